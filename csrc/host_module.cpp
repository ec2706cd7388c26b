// pybind11 module for what belongs on the host: no tensors, only NumPy arrays and plain values.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include "philox.h"

namespace py = pybind11;

namespace {

using Words = py::array_t<uint32_t, py::array::c_style | py::array::forcecast>;

// Philox4x32-10 as the kernels compute it, on arrays of counters [n, 4] and keys [n, 2].
py::array_t<uint32_t> philox4x32(const Words& counters, const Words& keys) {
    if (counters.ndim() != 2 || counters.shape(1) != 4 || keys.ndim() != 2 || keys.shape(1) != 2 ||
        keys.shape(0) != counters.shape(0)) {
        throw py::value_error("philox4x32: wanted counters [n, 4] and keys [n, 2]");
    }
    py::array_t<uint32_t> out({counters.shape(0), py::ssize_t{4}});
    auto c = counters.unchecked<2>();
    auto k = keys.unchecked<2>();
    auto o = out.mutable_unchecked<2>();
    for (py::ssize_t i = 0; i < c.shape(0); ++i) {
        const specdec::Philox4 words =
            specdec::philox4x32({{c(i, 0), c(i, 1), c(i, 2), c(i, 3)}}, k(i, 0), k(i, 1));
        for (int w = 0; w < 4; ++w) o(i, w) = words.word[w];
    }
    return out;
}

double uniform(int64_t seed, int64_t position, int64_t index, uint32_t purpose) {
    return specdec::uniform_at(seed, position, index, static_cast<specdec::Purpose>(purpose));
}

}  // namespace

PYBIND11_MODULE(_host, m) {
    m.doc() = "Host-side functions of specdec_ext on NumPy arrays.";
    m.def("philox4x32", &philox4x32, py::arg("counters"), py::arg("keys"),
          "Philox4x32-10 blocks [n, 4] of counters [n, 4] under keys [n, 2], all uint32.");
    m.def("uniform", &uniform, py::arg("seed"), py::arg("position"), py::arg("index"),
          py::arg("purpose"), "The uniform in [0, 1) that kernels draw for these coordinates.");
}
