#include "check.h"

namespace specdec::ops {

std::string shape_text(const Tensor& t) {
    std::ostringstream text;
    text << "[";
    for (int d = 0; d < t.dim(); ++d) text << (d ? ", " : "") << t.size(d);
    text << "]";
    return text.str();
}

std::string strides_text(const Tensor& t) {
    std::ostringstream text;
    text << "strides [";
    for (int d = 0; d < t.dim(); ++d) text << (d ? ", " : "") << t.stride(d);
    text << "] of shape " << shape_text(t);
    return text.str();
}

namespace {
thread_local const char* g_op_at_work = "";
}  // namespace

const char* op_at_work() {
    return g_op_at_work;
}

Arg::Arg(const char* op, const char* name, const Tensor& t) : op_(op), name_(name), t_(t) {
    g_op_at_work = op;
    if (!t.defined()) fail(op, name, "wanted a tensor, got None");
}

const Arg& Arg::dims(int wanted, const char* shape) const {
    if (t_.dim() != wanted) fail(op_, name_, "wanted shape ", shape, ", got ", shape_text(t_));
    return *this;
}

const Arg& Arg::dtype(std::initializer_list<DType> wanted) const {
    const std::optional<DType> got = dtype_of(t_);
    for (DType w : wanted) {
        if (got && *got == w) return *this;
    }
    std::ostringstream names;
    for (DType w : wanted) names << (names.tellp() > 0 ? " or " : "") << dtype_name(w);
    fail(op_, name_, "wanted dtype ", names.str(), ", got ", dtype_text(t_));
}

const Arg& Arg::size(int dim, int64_t wanted, const char* what) const {
    if (t_.size(dim) != wanted) {
        fail(op_, name_, "wanted size ", wanted, " (", what, ") in dimension ", dim, ", got shape ",
             shape_text(t_));
    }
    return *this;
}

const Arg& Arg::size_at_least(int dim, int64_t wanted, const char* what) const {
    if (t_.size(dim) < wanted) {
        fail(op_, name_, "wanted at least ", wanted, " (", what, ") in dimension ", dim,
             ", got shape ", shape_text(t_));
    }
    return *this;
}

const Arg& Arg::same_device(const Tensor& other, const char* other_name) const {
    const bool same = t_.is_cuda() == other.is_cuda() && t_.is_cpu() == other.is_cpu() &&
                      (!t_.is_cuda() || t_.get_device_index() == other.get_device_index());
    if (!same) {
        fail(op_, name_, "wanted the device of ", other_name, ", got ",
             t_.is_cuda()  ? "cuda:"
             : t_.is_cpu() ? "cpu"
                           : "another device type",
             t_.is_cuda() ? std::to_string(t_.get_device_index()) : "");
    }
    return *this;
}

const Arg& Arg::dense_last() const {
    const int last = static_cast<int>(t_.dim()) - 1;
    if (t_.numel() > 0 && t_.size(last) > 1 && t_.stride(last) != 1) {
        fail(op_, name_, "wanted stride 1 in the last dimension, got ", strides_text(t_));
    }
    return *this;
}

const Arg& Arg::dense() const {
    if (t_.numel() > 0 && !t_.is_contiguous()) {
        fail(op_, name_, "wanted a contiguous tensor, got ", strides_text(t_));
    }
    return *this;
}

const Arg& Arg::offsets() const {
    return dims(1, "[B+1]").dtype({DType::kI32}).size_at_least(0, 1, "B + 1").dense();
}

const Arg& Arg::per_request(int64_t batch, const char* what) const {
    return dims(1, "[B]").dtype({DType::kI32}).size(0, batch, what).dense();
}

}  // namespace specdec::ops
