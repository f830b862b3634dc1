from lowtide.deferred.api import Deferral, RealLogitsWarning, defer_logits

__all__ = ["Deferral", "RealLogitsWarning", "defer_logits"]
