"""Triton's interpreter in a third of the time, by leaving out what it does for nothing or again;
and that of Triton 3.5 without its refusal of strides which are aligned.

A Triton without the names below is left as it is: then the tests take longer, that is all (decision
0031).
"""

import functools
import inspect
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import torch
import triton
from triton.language import core, semantic
from triton.runtime import interpreter

MOST_NUMBERS = 10_000
# Operators of tensors that NumPy has, for elements of these types.
PLAIN, TRUTH = frozenset({"fp32", "int32", "int64"}), frozenset({"int1"})
INTEGERS = frozenset({"int32", "int64"})
OPERATORS = {
    **{"__add__": np.add, "__sub__": np.subtract, "__mul__": np.multiply},
    **{"__radd__": np.add, "__rsub__": lambda x, y: np.subtract(y, x), "__rmul__": np.multiply},
    **{"__lt__": np.less, "__le__": np.less_equal, "__gt__": np.greater, "__ge__": np.greater_equal},
    **{"__eq__": np.equal, "__ne__": np.not_equal, "__and__": np.bitwise_and, "__or__": np.bitwise_or},
}
# What a number becomes beside a tensor, and the numbers of which this is known.
NUMBERS = {
    **{(float, "fp32"): np.float32, (int, "fp32"): np.float32},
    **{(int, "int32"): np.int32, (int, "int64"): np.int64},
}
LARGEST = {int: 1 << 24, float: 1e38}
CONVERTED = PLAIN | TRUTH | {"int8", "int16"}  # types from which a cast is NumPy's


@functools.cache  # what is replaced twice takes twice as long
def leave_out_what_has_no_effect() -> None:
    if hasattr(interpreter, "_get_np_dtype"):
        _look_up_a_type_once()
    if hasattr(interpreter, "_convert_float"):
        _shift_bfloat16()
    if hasattr(core, "block_type") and hasattr(core, "tensor"):
        _describe_a_shape_once()
    if hasattr(core, "dtype") and hasattr(core.block_type, "with_element_ty"):
        _compare_and_make_types_once()
    if hasattr(semantic, "TritonSemantic"):
        _leave_operands_that_fit(semantic.TritonSemantic)
    if hasattr(interpreter, "_LangPatchScope") and hasattr(interpreter, "interpreter_semantic"):
        _find_builtins_once()  # Triton 3.5 has no scope: its first launch replaces builtins for good
    if hasattr(core, "_unwrap_if_constexpr"):
        _take_plain_arguments_as_they_are()
    if hasattr(interpreter, "_validate_np_data_size") and hasattr(interpreter, "TensorHandle"):
        interpreter.TensorHandle.__init__ = _init_handle
    if hasattr(interpreter, "_patch_lang") and hasattr(interpreter, "GridExecutor"):
        _replace_the_language_once()
        if not torch.cuda.is_available():
            _leave_tensors_where_they_are()
    builder = getattr(interpreter, "interpreter_builder", None)
    options = getattr(builder, "options", None)
    if hasattr(options, "sanitize_overflow") and not options.debug:
        # Each sum and product of integers is formed again in 64 bits, compared, and the result
        # thrown away: device_assert looks at it where `debug` is set alone.
        builder.options = replace(options, sanitize_overflow=False)


def take_strides_in_bytes() -> None:
    """Triton 3.5 wants 16 to divide a stride in numbers; a tensor map in bytes, as 3.6 says."""
    if triton.__version__.startswith("3.5."):
        validate = interpreter.TensorDescHandle.validate

        def validate_bytes(self):
            strides, size = self.strides, self.base.dtype.element_ty.primitive_bitwidth // 8
            rows = [SimpleNamespace(data=each.data * size) for each in strides[:-1]]
            self.strides = [*rows, strides[-1]]
            try:
                validate(self)
            finally:
                self.strides = strides

        interpreter.TensorDescHandle.validate = validate_bytes


def _replace_the_language_once() -> None:
    """The functions of triton.language are replaced at each launch, and again at each call of one
    jitted function by another, of which a launch has dozens; and put back at its end. They stay
    replaced from the first launch on."""
    replace_language = interpreter._patch_lang
    every_name = SimpleNamespace(__globals__={"tl": triton.language, "core": core})

    @functools.cache
    def replace() -> SimpleNamespace:
        replace_language(every_name)
        return SimpleNamespace(restore=lambda: None)

    interpreter._patch_lang = lambda function: replace()


def _find_builtins_once() -> None:
    """Each launch goes through all names of the language, and each call of a builtin through two
    functions that look for one argument."""
    found, scoped = {}, interpreter.interpreter_semantic

    def called(member):
        function = getattr(member, "__wrapped__", member)

        def call(*arguments, **named):
            named["_semantic"] = scoped
            return function(*arguments, **named)

        return call

    def replace_builtins(language, builder, scope):
        if id(language) not in found:  # these are modules and classes, which stay
            members = inspect.getmembers(language, core.is_builtin)
            calls = {name: called(member) for name, member in members}
            if language is core.tensor:
                calls |= {name: _at_once(name, call) for name, call in calls.items() if name in OPERATORS}
                calls["__getitem__"] = _view_at_once(calls["__getitem__"])
            found[id(language)] = [*calls.items()]
        for name, call in found[id(language)]:
            scope.set_attr(language, name, call)

    interpreter._patch_builtin = replace_builtins


def _at_once(name, call):
    """An operator of tensors as NumPy's. A hundred calls find out how two types combine, which
    depends on the types alone: the first time they are made, and NumPy's result is compared."""
    operation, known = OPERATORS[name], {}

    def run(self, other):
        kind = type(other)
        if kind is core.constexpr:
            other = other.value
            kind = type(other)
        if kind is core.tensor:
            key, data = (self.type.name, other.type.name), other.handle.data
        elif kind in LARGEST and abs(other) < LARGEST[kind]:
            key, data = (self.type.name, kind), other
        else:
            return call(self, other)
        if key not in known:
            result, change = call(self, other), _operand(name, self, other)
            if change and not _same(result.handle.data, operation(self.handle.data, change(data))):
                change = None
            known[key] = change, result.handle.dtype, result.type
            return result
        change, dtype, of_result = known[key]
        if change is None:
            return call(self, other)
        data = operation(self.handle.data, change(data))
        return core.tensor(interpreter.TensorHandle(data, dtype), of_result)

    return run


def _operand(name, tensor, other):
    """Return what turns an operand into NumPy's, or None where NumPy computes something else."""
    scalar = tensor.type.scalar
    if not isinstance(other, core.tensor):
        return NUMBERS.get((type(other), scalar.name))
    if name == "__add__" and scalar.is_ptr() and other.type.scalar.name in ("int32", "int64"):
        width = max(1, scalar.element_ty.primitive_bitwidth // 8)
        return lambda data: width * data.astype(np.uint64)
    types = TRUTH if name in ("__and__", "__or__") else PLAIN
    both = {scalar.name, other.type.scalar.name}
    return (lambda data: data) if both <= types and (len(both) == 1 or both == INTEGERS) else None


def _same(found, data):
    alike = found.dtype == data.dtype and found.shape == data.shape
    return alike and np.array_equal(found, data, equal_nan=data.dtype.kind == "f")


def _view_at_once(call):
    """x[:, None] as NumPy's: its type depends on that of x and on where None stands."""
    known = {}

    def run(self, slices):
        if type(slices) is not tuple or not all(each is None or each == slice(None) for each in slices):
            return call(self, slices)
        key = self.type.name, *[each is None for each in slices]
        if key not in known:
            result = call(self, slices)
            known[key] = result.handle.dtype, result.type
            return result
        dtype, of_result = known[key]
        return core.tensor(interpreter.TensorHandle(self.handle.data[slices], dtype), of_result)

    return run


def _init_handle(self, data, dtype, attr=None) -> None:
    """Without a comparison of the sizes of what NumPy returned."""
    self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr


def _take_plain_arguments_as_they_are() -> None:
    """Each argument is asked for four types that it may have; each load makes its policy anew."""
    unwrap, plain = core._unwrap_if_constexpr, frozenset({core.tensor, str, int, bool, float, type(None)})
    core._unwrap_if_constexpr = lambda value: value if type(value) in plain else unwrap(value)
    if hasattr(core, "_normalize_cache_policy"):
        normalize = core._normalize_cache_policy
        known = functools.cache(normalize)

        def normalized(policy, *names):
            texts = policy is None and all(type(name) is str for name in names)
            return (known if texts else normalize)(policy, *names)

        core._normalize_cache_policy = normalized


def _leave_tensors_where_they_are() -> None:
    """On the CPU. What would copy them refers to itself: they would live until a collection."""
    interpreter.GridExecutor._init_args_hst = lambda self, arguments, options: (arguments, options)
    interpreter.GridExecutor._restore_args_dev = lambda self, *arguments: None


def _look_up_a_type_once() -> None:
    """Each call makes a table of all types. Names stand for types, of which some have no hash."""
    look_up, found = interpreter._get_np_dtype, {}

    def np_dtype(type):
        if type.name not in found:
            found[type.name] = look_up(type)
        return found[type.name]

    interpreter._get_np_dtype = np_dtype


def _shift_bfloat16() -> None:
    """The upper half of a float32, cut off as the interpreter does: which takes any two formats
    apart, and gets subnormal numbers wrong."""
    convert = interpreter._convert_float

    def convert_float(data, source, target, rounding_mode):
        if (source, target) == (core.bfloat16, core.float32):
            return data.astype(np.uint32) << np.uint32(16)
        if (source, target, rounding_mode) == (core.float32, core.bfloat16, None):
            return (np.ascontiguousarray(data).view(np.uint32) >> np.uint32(16)).astype(np.uint16)
        return convert(data, source, target, rounding_mode)

    interpreter._convert_float = convert_float


def _describe_a_shape_once() -> None:
    """Each operation makes a type with its shape and name, and a tensor with the shape again."""
    make_type, make_tensor = core.block_type.__init__, core.tensor.__init__
    of_types, of_tensors = {}, {}

    def init_type(self, element_ty, shape):
        key = element_ty.name, *(size.value if isinstance(size, core.constexpr) else size for size in shape)
        if key not in of_types:
            make_type(self, element_ty, shape)
            of_types[key] = dict(self.__dict__)
        self.__dict__.update(of_types[key])

    def init_tensor(self, handle, type):
        if type.name not in of_tensors:
            make_tensor(self, handle, type)
            of_tensors[type.name] = {**self.__dict__, "handle": None}  # otherwise the data would stay
        self.__dict__.update(of_tensors[type.name], handle=handle)

    core.block_type.__init__, core.tensor.__init__ = init_type, init_tensor


def _compare_and_make_types_once() -> None:
    """A type is equal to itself, whatever its name; a block's with other elements is made again."""
    equal, with_element_ty, types = core.dtype.__eq__, core.block_type.with_element_ty, {}

    def equal_to(self, other):
        return self is other or equal(self, other)

    def with_elements(self, scalar_ty):
        key = self.name, scalar_ty.name
        if key not in types:
            types[key] = with_element_ty(self, scalar_ty)
        return types[key]

    core.dtype.__eq__, core.block_type.with_element_ty = equal_to, with_elements


def _leave_operands_that_fit(owner) -> None:
    """Operands that have one type and shape are asked dozens of times which they have. Whether they
    are left as they are depends on the names of their types alone; and what becomes of a number, on
    it and on the type of the other operand."""
    cast, broadcast, check = (
        getattr(owner, name) for name in ("cast", "broadcast_impl_value", "binary_op_type_checking_impl")
    )
    fitting, numbers, converted = set(), {}, {}

    def left(self, input, dst_ty, *options):
        key = input.type.name, dst_ty.name
        if key in fitting:
            return input
        found = converted.get(key)
        if found is not None and not any(options):
            data = input.handle.data.astype(found[0])
            return core.tensor(interpreter.TensorHandle(data, found[1]), found[2])
        result = cast(self, input, dst_ty, *options)
        if result is input:
            fitting.add(key)
        elif input.type.scalar.name in CONVERTED and result.type.scalar.name in PLAIN and not any(options):
            data = result.handle.data
            if _same(data, input.handle.data.astype(data.dtype)):
                converted[key] = data.dtype, result.handle.dtype, result.type
        return result

    def both_left(change):
        def change_number(self, lhs, rhs, *options, **named):
            left_one = isinstance(lhs, core.tensor)
            kept, number = (lhs, rhs) if left_one else (rhs, lhs)
            if not isinstance(kept, core.tensor) or type(number) not in (bool, int, float):
                return change(self, lhs, rhs, *options, **named)
            # By its text: 0.0 is equal to -0.0, and 1 to True.
            key = change, left_one, kept.type.name, repr(number), options, *named.items()
            if key not in numbers:
                both = change(self, lhs, rhs, *options, **named)
                if both[not left_one] is not kept:
                    return both
                if len(numbers) >= MOST_NUMBERS:
                    numbers.clear()
                numbers[key] = both[left_one]
            return (kept, numbers[key]) if left_one else (numbers[key], kept)

        def change_both(self, lhs, rhs, *options, **named):
            if not (isinstance(lhs, core.tensor) and isinstance(rhs, core.tensor)):
                return change_number(self, lhs, rhs, *options, **named)
            key = change, lhs.type.name, rhs.type.name, options, *named.items()
            if key in fitting:
                return lhs, rhs
            result = change(self, lhs, rhs, *options, **named)
            if result[0] is lhs and result[1] is rhs:
                fitting.add(key)
            return result

        return change_both

    owner.cast, owner.broadcast_impl_value = left, both_left(broadcast)
    owner.binary_op_type_checking_impl = both_left(check)
