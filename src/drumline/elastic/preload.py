"""Imported first by the fork server, so that it does not outlive a launcher that is killed."""

from drumline.elastic.lifetime import die_with_parent

die_with_parent()
