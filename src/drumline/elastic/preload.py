"""Imported first by the server that ranks are forked from: a launcher that is killed must not leave it behind."""

from drumline.elastic.lifetime import die_with_parent

die_with_parent()
