// Keep a process's exit code where a thread hangs while the interpreter ends.
//
// Until 3.13, Python unwinds a thread that wants its lock after the interpreter has ended. PyTorch's
// bindings take the lock in a destructor, which must not be unwound: std::terminate aborts.

#include <sys/syscall.h>
#include <torch/library.h>
#include <unistd.h>

#include <exception>

namespace checknrun {
namespace {

std::terminate_handler terminate_before = nullptr;

void park() {
  if (syscall(SYS_gettid) == getpid()) {
    terminate_before();  // the main thread: a fault of its own, to be seen
  }
  for (;;) {
    pause();  // the process ends without this thread
  }
}

void park_terminated_threads() {
  if (terminate_before == nullptr) {
    terminate_before = std::set_terminate(park);
  }
}

}  // namespace
}  // namespace checknrun

TORCH_LIBRARY_FRAGMENT(checknrun, library) {
  library.def("park_terminated_threads() -> ()", &checknrun::park_terminated_threads);
}
