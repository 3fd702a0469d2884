"""Kernels of a compiled graph for a CPU, compiled together.

Inductor calls the C++ compiler once for each kernel, and about half of each call is spent on templates of PyTorch's
header. Here the kernels of a graph are divided among as many files as Inductor compiles at once.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch._inductor.async_compile import AsyncCompile, get_compile_threads
from torch._inductor.codecache import CppPythonBindingsCodeCache

HEADER = "#include <torch/csrc/inductor/cpp_prefix.h>\n"
RENAMED = "#define kernel kernel_{i}\n{code}\n#undef kernel\n"
BINDING = """
static PyObject* python_kernel_{i}(PyObject*, PyObject* args) try {{
    kernel_{i}({arguments});
    Py_RETURN_NONE;
}} catch (std::exception const& error) {{
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
}}
"""
METHOD = '{{"kernel_{i}", python_kernel_{i}, METH_VARARGS, ""}}'


@dataclass(frozen=True)
class Kernel:
    """C++ code of a function `kernel`, and the types of its arguments."""

    types: list[str]
    code: str

    def binding(self, i: int) -> str:
        """Return the code of a Python function that calls `kernel_i`."""
        parts = (f"parse_arg<{kind.replace('const ', '')}>(args, {n})" for n, kind in enumerate(self.types))
        return BINDING.format(i=i, arguments=", ".join(parts))


class GraphKernels(AsyncCompile):
    """The kernels that the module of a compiled graph defines."""

    def cpp_pybinding(self, types: list[str], code: str) -> Any:
        """Return a kernel, which `wait` replaces by a Python function."""
        is_template = code.count("#include") > 1  # its functions may have the names of another's
        return super().cpp_pybinding(types, code) if is_template else Kernel(types, code)

    def wait(self, scope: dict[str, Any]) -> None:
        """Compile the kernels among the variables of the module, and replace them by Python functions."""
        names = [name for name, value in scope.items() if isinstance(value, Kernel)]
        files = min(len(names), get_compile_threads())
        bundles = [names[i::files] for i in range(files)]
        futures = [self._load([scope[name] for name in bundle]) for bundle in bundles]
        for bundle, future in zip(bundles, futures, strict=True):
            function_of = future()
            scope |= {name: function_of(i) for i, name in enumerate(bundle)}
        super().wait(scope)

    def _load(self, kernels: list[Kernel]) -> Callable[[], Callable[[int], Callable]]:
        """Begin to compile kernels in one file. Return a function that waits for the file, and returns its function
        from the number of a kernel to its Python function."""
        code = HEADER + "".join(RENAMED.format(i=i, code=kernel.code) for i, kernel in enumerate(kernels))
        methods = ", ".join(METHOD.format(i=i) for i in range(len(kernels)))
        bindings = "".join(kernel.binding(i) for i, kernel in enumerate(kernels))
        bindings += f"static PyMethodDef kernels[] = {{{methods}}};"

        class File(CppPythonBindingsCodeCache):
            extra_parse_arg = bindings.replace("{", "{{").replace("}", "}}")
            call_entry_function = "return PyCFunction_New(&kernels[{}], nullptr);"

        submit = self.submit if get_compile_threads() > 1 else None
        return File.load_pybinding_async(["int64_t"], code, submit_fn=submit)
