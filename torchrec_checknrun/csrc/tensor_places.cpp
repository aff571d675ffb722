// torch.classes.checknrun.TensorPlaces: whether many tensors lie where they did, in one call.
#include <ATen/core/Tensor.h>
#include <torch/custom_class.h>

#include <algorithm>
#include <vector>

namespace checknrun {
namespace {

// Where tensors lay, and in which form. Not the tensors, which Python may swap for others.
struct TensorPlaces : torch::CustomClassHolder {
  explicit TensorPlaces(const std::vector<at::Tensor>& tensors) : count_(tensors.size()) {
    for (const at::Tensor& tensor : tensors) {
      visit(tensor, [&](int64_t number) {
        numbers_.push_back(number);
        return true;
      });
    }
  }

  // Returns whether each tensor has the address, the dtype, the shape and the strides it had.
  bool same(const std::vector<at::Tensor>& tensors) const {
    auto next = numbers_.begin();
    const auto is_next = [&](int64_t number) {
      return next != numbers_.end() && *next++ == number;
    };
    return tensors.size() == count_ &&
           std::all_of(tensors.begin(), tensors.end(),
                       [&](const at::Tensor& tensor) { return visit(tensor, is_next); });
  }

 private:
  // Visits the numbers of one tensor while the visitor returns true; returns whether it always did.
  template <typename Visitor>
  static bool visit(const at::Tensor& tensor, const Visitor& visitor) {
    return visitor(reinterpret_cast<int64_t>(tensor.const_data_ptr())) &&
           visitor(int64_t(tensor.scalar_type())) && visitor(tensor.dim()) &&
           std::all_of(tensor.sizes().begin(), tensor.sizes().end(), visitor) &&
           std::all_of(tensor.strides().begin(), tensor.strides().end(), visitor);
  }

  const size_t count_;
  std::vector<int64_t> numbers_;
};

}  // namespace
}  // namespace checknrun

TORCH_LIBRARY_FRAGMENT(checknrun, library) {
  using checknrun::TensorPlaces;
  library.class_<TensorPlaces>("TensorPlaces")
      .def(torch::init<std::vector<at::Tensor>>())
      .def("same", &TensorPlaces::same);
}
