// Argument checks. Every message names the op, the argument, what was wanted and what came:
//   specdec::append_kv: k_cache: wanted dtype float32 or float8_e4m3fn, got bfloat16
// All checks run before anything is allocated or launched (an exception thrown later, inside a
// parallel region, would lose its text in the stable ABI).
#pragma once

#include <initializer_list>
#include <sstream>
#include <stdexcept>

#include "abi.h"

namespace specdec::ops {

template <class... Parts>
[[noreturn]] void fail(const char* op, const char* argument, const Parts&... parts) {
    std::ostringstream text;
    text << "specdec::" << op << ": " << argument << ": ";
    (text << ... << parts);
    throw std::runtime_error(text.str());
}

std::string shape_text(const Tensor& t);
std::string strides_text(const Tensor& t);  // "strides [2, 6] of shape [3, 2]"

// The op whose arguments this thread checked last: whose call it is in.
const char* op_at_work();

// A tensor argument under its name; the checks chain: Arg(op, "k", k).dims(3, "[R, Hkv, D]")...
class Arg {
  public:
    Arg(const char* op, const char* name, const Tensor& t);  // fails for None

    const Arg& dims(int wanted, const char* shape) const;
    const Arg& dtype(std::initializer_list<DType> wanted) const;
    const Arg& index() const { return dtype({DType::kI32, DType::kI64}); }
    // `what` says where the wanted size comes from, e.g. "R of k".
    const Arg& size(int dim, int64_t wanted, const char* what) const;
    const Arg& size_at_least(int dim, int64_t wanted, const char* what) const;
    const Arg& same_device(const Tensor& other, const char* other_name) const;
    // The last dimension dense; tensors without elements may have any strides.
    const Arg& dense_last() const;
    const Arg& dense() const;  // contiguous altogether
    // The two int32 lists of the ragged layout, contiguous: [B+1] offsets, and one number per request.
    const Arg& offsets() const;
    const Arg& per_request(int64_t batch, const char* what) const;

    DType type() const { return *dtype_of(t_); }
    const Tensor& tensor() const { return t_; }

  private:
    const char* op_;
    const char* name_;
    const Tensor& t_;
};

template <class Value>
void check_option(bool ok, const char* op, const char* name, const char* wanted, const Value& got) {
    if (!ok) fail(op, name, "wanted ", wanted, ", got ", got);
}

}  // namespace specdec::ops
