"""Define the bytes that each part of a call takes, from which its sizes follow.

    fixed       vectors of N and V elements, and what further linear terms take
    per token   the logits of a token, and copies of its features and their gradient if dtypes or
                strides require them
    shared      one buffer of the exponentials engine: first the partial sums of tiles, then the
                rows of a dX GEMM, or parts of its tiles
    sum         the accumulator of a rounded weight gradient (weight_gradient.py)
    copy        a block of the weight, if a GEMM cannot read its dtype or strides

Shapes: N tokens, D features, V classes.
"""

from dataclasses import dataclass, replace

# Tensor-core tiles are 128 rows high. The height of the CPU's row block matters less.
ROW_TILE = {"cpu": 8, "cuda": 128}

# A product of rows of dX that is to be small takes at most so many bytes: its GEMM then has about
# one tile of the result for each multiprocessor. It has at least so many rows; with fewer, reading
# the weight takes longer than the GEMM.
PRODUCT_BYTES, FEWEST_PRODUCT_ROWS = 18 << 20, 256  # decision 0074

# Of at most so many tokens, cuBLAS forms dW by a single GEMM, and the rows of the target classes
# once more in float32, if these take no more memory than a small product of dX. Else the single
# GEMM is our own, and keeps these rows in 24 bits.
FORMED_AGAIN = 1024  # decision 0088


def forms_targets_again(N: int, D: int) -> bool:
    """Return True if cuBLAS forms dW by a single GEMM, and the targets' rows by a second one."""
    return N <= FORMED_AGAIN and formed_again_bytes(N, D) <= PRODUCT_BYTES


def formed_again_bytes(N: int, D: int, size: int = 2) -> int:
    """Return the bytes of the targets' rows in float32, and of their columns of exponentials.

    An exponential has `size` bytes.
    """
    return padded(N) * (N * size + D * 4)


def padded(columns: int, multiple: int = 8) -> int:
    """Return the columns of a buffer whose rows begin at whole vectors of 16 bytes.

    They do so in float32 and in half precision (decision 0053). Tensor maps require it.
    """
    return -(-columns // multiple) * multiple


def exponentials_stride(classes: int) -> int:
    """Return the numbers from one row of exponentials to the next.

    Rows of many classes begin at cache lines of 128 bytes (decision 0079).
    """
    return padded(classes, 64 if classes >= 2048 else 8)


def padded_classes(classes: int, device: str) -> int:
    """Return the columns of a buffer of logits, which is padded on CUDA."""
    return padded(classes) if device == "cuda" else classes


@dataclass(frozen=True, slots=True)
class ClassBlocks:
    """Hold the memory that the two sweeps take (decision 0034), in bytes unless stated."""

    N: int  # tokens
    D: int  # features
    V: int  # classes
    step: int  # multiple of tokens and classes: the tile size
    exponential: int
    """Bytes of one exponential."""
    gradient: int
    """Bytes of the weight gradient per class; they hold exponentials until the class is formed."""
    partials: int
    """Bytes of float32 partial sums per row and half tile."""
    statistics: int
    """Bytes per row of the partial sums of all half tiles, if only statistics are wanted."""
    largest: int
    """Bytes per row of all half tiles' largest logits, if classes come in blocks."""
    product: int
    """Bytes per row of the float32 results that become dX."""
    row: int
    """Other bytes per token in the first sweep."""
    gradient_row: int
    """Other bytes per token in the second sweep."""
    class_sum: int
    """Bytes per class in the second sweep."""
    softcap: bool = False
    """True if the epilogue of exponentials applies a soft cap."""
    copies_rows: bool = False
    """True if rows of X are copied, so that tokens that are stored come in chunks as well."""

    def most_classes(self, rows: int) -> int:
        """Return the most classes at a time whose exponentials fit in the gradient's memory."""
        columns = self.V * self.gradient // (rows * self.exponential)
        if rows == 1 or columns >= exponentials_stride(self.V):
            return self.V
        return columns - columns % (64 if columns >= 2048 else 8)

    def most_stored(self, classes: int) -> int:
        """Return the most tokens that can be stored in blocks of so many classes."""
        widths = {classes, self.V % classes or classes}
        strides = {each: exponentials_stride(each) * self.exponential for each in widths}
        return min(self.N, *(each * self.gradient // stride for each, stride in strides.items()))

    def of_chunk(self, rows: int, classes: int, product_rows: int, *, stored: bool = False) -> int:
        """Return the bytes of the first sweep with these sizes.

        If a chunk's exponentials are all there, its rows of dX are formed `product_rows` at a time.
        """
        partials = (classes // self.step + 2) * self.partials + (self.largest if classes < self.V else 0)
        at_once = min(rows, product_rows) if stored or classes == self.V else rows
        return rows * (self.row + max(partials, self.statistics)) + at_once * self.product

    def of_block(self, rows: int, classes: int, stored: int = 0) -> int:
        """Return the bytes of the second sweep with these sizes, `stored` tokens of it at once."""
        stride = max(exponentials_stride(classes), classes + 8)
        own = rows * stride * self.exponential + classes * self.class_sum
        return own + max(rows, stored) * self.gradient_row


@dataclass(frozen=True, slots=True)
class ByteCounts:
    """Hold the memory that each part of one call takes, in bytes unless stated."""

    N: int  # tokens
    D: int  # features
    V: int  # classes
    device: str
    fixed: int
    """Bytes whatever the sizes: vectors, and `further_terms`."""
    token_bytes: int
    """Bytes per token of a chunk, held as long as the chunk lasts."""
    weight_sum: int
    """Bytes of the float32 accumulator of a rounded weight gradient; 0 if none is rounded."""
    weight_copy: int
    """Bytes of the copy of one class, in the operands' dtype; 0 if no copy is needed."""
    class_sum: int
    """Bytes of the float32 accumulator of one class, [D]."""
    block_logit: int
    """Bytes of one logit and its gradient in a class block."""
    block_row: int
    """Other bytes per token of a class block."""
    product_rows: int
    """The most rows of one dX GEMM (tokens, not bytes)."""
    forms_dw: bool = True
    """True if the call forms the gradient [V, D] of the first weight."""
    further_terms: int = 0
    """Bytes of the float32 sums and the copies of further linear terms."""
    packed_sum: int = 0
    """Bytes of a packed sum beyond the gradient's memory; 0 if the engine has no such sum."""
    packed_sum_20: int = 0
    """The same with 20 bits, where `packed_sum` is with 24; 0 if there is only one form."""
    one_product_row: int = 0
    """Bytes per token if a single GEMM over all tokens forms dW; 0 without such a GEMM."""
    rows_of_logits: int = 0
    """The most tokens of a chunk whose float32 logits lie in dW's memory before such a GEMM.

    0 for all tokens: they are one chunk, whose logits or exponentials have memory of their own.
    """
    sum_row: int = 0
    """Bytes per token of such a chunk beside `one_product_row`: its float32 rows of dX."""
    own_logits_row: int = 0
    """Bytes per token if the logits of all tokens have memory of their own; 0 if never."""
    rounded_block: int = 0
    """Bytes of the smallest float32 block of classes that a single GEMM for dW is rounded from."""
    target_rows_bytes: int = 0
    """Bytes beside a single GEMM for targets' rows: their lower bits, or the rows in float32.

    They are freed before the dX GEMM.
    """
    partials_bytes: int = 0
    """Bytes per token of tile partial sums; freed before the dX GEMM."""
    product: int = 0
    """Bytes per row of the float32 result of the dX GEMM."""
    parts: int = 0
    """Bytes of parts of tiles of dX, which take the place of `product` if rows are skipped.

    A chunk also holds `parts_row` bytes for each row of its row tiles, but at most `parts` more.
    """
    parts_row: int = 0
    longest: int = 0
    """The most tokens of a chunk; 0 for no limit."""
    pipelined_rows: int = 0
    """Rows of a chunk from which the Gluon pipeline forms a 24-bit sum; 0 if it does not.

    N is not asked, because it may be a symbol.
    """
    softcap: bool = False
    """True if the epilogue of exponentials applies a soft cap."""
    may_skip: bool = False
    """True if ignored rows may be skipped, in every way to form dW but class blocks."""
    gathered_row: int = 0
    """Bytes per token of the gathered rows of X that tokens in several chunks take, if skipped."""
    skips: bool = False
    """True in the counts of a call that skips ignored rows; a GEMM of our own then forms dX."""
    recomputed: int = 1
    """Number of GEMMs that class blocks recompute (not bytes)."""
    class_blocks: ClassBlocks | None = None
    """Memory of the two sweeps, in the exponentials engine."""

    def of_skipping(self) -> "ByteCounts":
        """Return the counts of the same call if it skips ignored rows."""
        return replace(self, skips=True)

    def chunk(self, rows: int) -> int:
        """Return the bytes of a chunk of `rows` rows."""
        return rows * self._of_token(rows) + self.shared_buffer_bytes(rows)

    def _of_token(self, rows: int) -> int:
        """Return the bytes per token of a chunk, apart from the shared buffer."""
        return self.token_bytes + (self.gathered_row if self.skips and rows < self.N else 0)

    def single_product(self, block: int = 0) -> int:
        """Return the bytes of one chunk of all tokens with a single GEMM for dW.

        If the GEMM is rounded from blocks of classes, `block` is the bytes of one, or 0 for the
        smallest.
        The gradient rows of target classes are formed before the dX GEMM, in the same memory.
        """
        shared = max(self.shared_buffer_bytes(self.N), self.target_rows_bytes)
        sums = min(self.N, self.rows_of_logits) * self.sum_row
        return self.N * self.one_product_row + sums + shared + max(block, self.rounded_block)

    def with_own_logits(self) -> "ByteCounts":
        """Return the counts of one chunk whose logits have memory of their own."""
        row = self.own_logits_row
        return replace(self, one_product_row=row, rows_of_logits=0, sum_row=0, own_logits_row=0)

    @property
    def one_chunk(self) -> int:
        """Return the bytes of a call with one chunk of all tokens, and no sum for dW."""
        chunk = self.single_product() if self.one_product_row else self.chunk(self.N)
        return self.fixed + self.smallest_copy + chunk

    @property
    def one_chunk_and_sum(self) -> int:
        """Return the bytes of a call with one chunk of all tokens, and any sum that dW needs."""
        return self.one_chunk + (0 if self.one_product_row else self.packed_sum or self.weight_sum)

    def with_smaller_products(self, workspace: int) -> "ByteCounts":
        """Return the counts with fewer rows per dX GEMM, until one chunk fits in the workspace.

        The result has the smallest product if none fits.
        """
        rows = self.product_rows
        while (
            replace(self, product_rows=rows).one_chunk > workspace
            and rows > FEWEST_PRODUCT_ROWS
            and min(rows, self.N) * self.product > PRODUCT_BYTES
        ):
            rows //= 2
        return self if rows == self.product_rows else replace(self, product_rows=rows)

    def shared_buffer_bytes(self, rows: int) -> int:
        """Return the bytes of the buffer that tile partial sums and then dX's GEMMs share."""
        if self.skips:
            of_dx = self.parts + min(self.parts, padded(rows, ROW_TILE[self.device]) * self.parts_row)
        else:
            of_dx = min(rows, self.product_rows) * self.product
        return max(rows * self.partials_bytes, of_dx)

    def class_block(self, rows: int, classes: int) -> int:
        """Return the bytes of a class block where there are no two sweeps."""
        of_row = classes * self.block_logit + self.block_row
        return rows * of_row + classes * (self.class_sum + self.weight_copy)

    def most_rows(self, room: int) -> int:
        """Return the largest number of rows whose chunk fits in `room` bytes."""
        of_all = self._most_rows(room, self._of_token(self.N))
        return of_all if of_all >= self.N else self._most_rows(room, self._of_token(0))

    def _most_rows(self, room: int, of_token: int) -> int:
        if self.skips:
            in_tiles = room - self.parts - (ROW_TILE[self.device] - 1) * self.parts_row
            beside_dx = max((room - 2 * self.parts) // of_token, in_tiles // (of_token + self.parts_row))
        else:
            in_pieces = (room - self.product_rows * self.product) // of_token
            beside_dx = max(in_pieces, room // (of_token + self.product))
        most = min(beside_dx, room // (of_token + self.partials_bytes))
        return min(most, self.longest) if self.longest else most

    def packed_bytes(self, bits: int) -> int:
        """Return the bytes of a packed sum with this many bits."""
        return (bits == 20 and self.packed_sum_20) or self.packed_sum

    @property
    def smallest_copy(self) -> int:
        """Return the bytes of the smallest copy of classes.

        One smaller than a row of logits would divide one large GEMM into many small ones.
        """
        return min(self.V * self.weight_copy, max(self.token_bytes, self.weight_copy))

    @property
    def smallest_workspace(self) -> int:
        """Return the bytes of the smallest workspace that the call runs in."""
        row = self.chunk(1)
        if self.class_blocks is not None:
            row = max(row, self.class_blocks.of_chunk(1, self.V, 1))
        sums = 2 * self.class_sum if self.weight_sum else 0
        return self.fixed + row + self.smallest_copy + sums
