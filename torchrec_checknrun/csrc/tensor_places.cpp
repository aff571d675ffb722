// torch.classes.checknrun.TensorPlaces: where many tensors lie, asked for in one call.
#include <ATen/core/Tensor.h>
#include <torch/custom_class.h>

namespace checknrun {
namespace {

// Tensors that are looked at every step. Each follows what is done to its Python object, such as
// an assignment to ``.data``.
struct TensorPlaces : torch::CustomClassHolder {
  explicit TensorPlaces(std::vector<at::Tensor> tensors) : tensors_(std::move(tensors)) {}

  // Returns of each tensor the address, the number of dimensions, the shape and the strides.
  std::vector<int64_t> layouts() const {
    std::vector<int64_t> found;
    found.reserve(6 * tensors_.size());
    for (const at::Tensor& tensor : tensors_) {
      found.push_back(address(tensor));
      found.push_back(tensor.dim());
      for (const int64_t size : tensor.sizes()) found.push_back(size);
      for (const int64_t stride : tensor.strides()) found.push_back(stride);
    }
    return found;
  }

 private:
  static int64_t address(const at::Tensor& tensor) {
    return reinterpret_cast<int64_t>(tensor.const_data_ptr());
  }

  std::vector<at::Tensor> tensors_;
};

}  // namespace
}  // namespace checknrun

TORCH_LIBRARY_FRAGMENT(checknrun, library) {
  using checknrun::TensorPlaces;
  library.class_<TensorPlaces>("TensorPlaces")
      .def(torch::init<std::vector<at::Tensor>>())
      .def("layouts", &TensorPlaces::layouts);
}
