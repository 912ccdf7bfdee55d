# Type stub of the compiled core: csrc/core.h is the documentation.
from collections.abc import Sequence

class _CData:
    def __int__(self) -> int: ...

class _Lib:
    PR_OK: int
    PR_BAD_OP: int
    PR_BAD_DTYPE: int
    PR_BAD_PAIR: int
    PR_BAD_COUNT: int
    PR_BAD_DIVISOR: int
    PR_BAD_ISA: int
    PR_SUM: int
    PR_PROD: int
    PR_MIN: int
    PR_MAX: int
    PR_LAND: int
    PR_LOR: int
    PR_LXOR: int
    PR_BAND: int
    PR_BOR: int
    PR_BXOR: int
    PR_OP_COUNT: int
    PR_BOOL: int
    PR_INT8: int
    PR_INT16: int
    PR_INT32: int
    PR_INT64: int
    PR_UINT8: int
    PR_UINT16: int
    PR_UINT32: int
    PR_UINT64: int
    PR_FLOAT16: int
    PR_BFLOAT16: int
    PR_FLOAT32: int
    PR_FLOAT64: int
    PR_LONGDOUBLE: int
    PR_COMPLEX64: int
    PR_COMPLEX128: int
    PR_DTYPE_COUNT: int
    def pr_fold(self, op: int, dtype: int, n: int, out: int, srcs: Sequence[int], k: int, /) -> int: ...
    def pr_fold2(self, op: int, dtype: int, n: int, out: int, first: int, second: int, /) -> int: ...
    def pr_copy(self, nbytes: int, out: int, src: int, /) -> None: ...
    def pr_divide(self, dtype: int, n: int, out: int, src: int, divisor: float, /) -> int: ...
    def pr_isa(self) -> _CData: ...
    def pr_cell_add(self, cell: int, value: int, record: int, /) -> None: ...
    def pr_cell_set(self, cell: int, value: int, record: int, /) -> None: ...
    def pr_cell_look(self, cell: int, expected: int, times: int, /) -> int: ...
    def pr_cell_look_equal(self, cell: int, expected: int, times: int, /) -> int: ...
    def pr_cell_read(self, cell: int, /) -> int: ...
    def pr_cell_compare_and_swap(self, cell: int, expected: int, desired: int, /) -> int: ...
    def pr_cell_wait(self, cell: int, expected: int, equal: int, times: int, nanoseconds: int, /) -> int: ...

class _FFI:
    NULL: _CData
    def string(self, cdata: _CData) -> bytes: ...
    def typeof(self, cdecl: str) -> object: ...
    def cast(self, cdecl: object, source: object) -> _CData: ...
    def from_buffer(self, python_buffer: object, require_writable: bool = ...) -> _CData: ...

ffi: _FFI
lib: _Lib
