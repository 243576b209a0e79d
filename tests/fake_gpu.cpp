// For torch to index and differentiate fake CUDA tensors: a device guard that does nothing, and hooks that say there is
// one CUDA device. torch finds the hooks by the name CUDAHooks, and asks for them once, while it starts: of a CUDA build
// they take the place by priority, and the guard when `take_over` is called after torch has been imported.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

using namespace c10;
const Device gpu{DeviceType::CUDA, 0};

struct Guard final : impl::NoOpDeviceGuardImpl<DeviceType::CUDA> {
  Device exchangeDevice(Device) const override { return gpu; }
  Device getDevice() const override { return gpu; }
  Stream getStream(Device) const noexcept override { return Stream(Stream::DEFAULT, gpu); }
  Stream exchangeStream(Stream) const noexcept override { return Stream(Stream::DEFAULT, gpu); }
};

struct CUDAHooks final : at::CUDAHooksInterface {
  CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex current_device() const override { return 0; }
};

impl::DeviceGuardImplRegistrar registrar(DeviceType::CUDA, new Guard());
extern "C" void take_over() { impl::DeviceGuardImplRegistrar again(DeviceType::CUDA, new Guard()); }

namespace at {
C10_REGISTER_CLASS_WITH_PRIORITY(CUDAHooksRegistry, CUDAHooks, c10::REGISTRY_PREFERRED, CUDAHooks)
}
