"""A run -> answers over HTTP, in the form of OpenAI's API, and a page to talk to the model.

requests: a body of JSON -> what is wanted, or an error. choices: tokens -> pieces of text, in the engine's thread.
answers: pieces -> JSON. app: the routes, and who may use them. server: the process, from its port to its end.
"""

from typing import TYPE_CHECKING

from drumline.lazy import public

if TYPE_CHECKING:
    from drumline.serve.jobs import Limits
    from drumline.serve.server import ServeConfig, serve_run

__getattr__, __dir__, __all__ = public(__name__, __file__)
