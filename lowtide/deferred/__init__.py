from lowtide.deferred.api import Deferral, defer_logits
from lowtide.deferred.counting import RealLogitsWarning
from lowtide.deferred.steps import HeadNotCalledWarning

__all__ = ["Deferral", "HeadNotCalledWarning", "RealLogitsWarning", "defer_logits"]
