from lowtide.chunked_loss.api import chunked_loss

__all__ = ["chunked_loss"]
