//! The driver's functions by name.

use std::ffi::{c_char, c_int, c_uint, c_void};

use vendor::functions;

use super::IpcHandle;

type Opaque = *mut c_void;

functions! {
    pub(super) struct Table {
        required {
            init = "cuInit": fn(c_uint) -> c_int;
            driver_version = "cuDriverGetVersion": fn(*mut c_int) -> c_int;
            error_string = "cuGetErrorString": fn(c_int, *mut *const c_char) -> c_int;
            device_count = "cuDeviceGetCount": fn(*mut c_int) -> c_int;
            device_get = "cuDeviceGet": fn(*mut c_int, c_int) -> c_int;
            device_name = "cuDeviceGetName": fn(*mut c_char, c_int, c_int) -> c_int;
            device_attribute = "cuDeviceGetAttribute": fn(*mut c_int, c_int, c_int) -> c_int;
            context_retain = "cuDevicePrimaryCtxRetain": fn(*mut Opaque, c_int) -> c_int;
            context_set = "cuCtxSetCurrent": fn(Opaque) -> c_int;
            context_get = "cuCtxGetCurrent": fn(*mut Opaque) -> c_int;
            context_device = "cuCtxGetDevice": fn(*mut c_int) -> c_int;
            context_synchronize = "cuCtxSynchronize": fn() -> c_int;
            stream_create = "cuStreamCreateWithPriority": fn(*mut Opaque, c_uint, c_int) -> c_int;
            stream_destroy = "cuStreamDestroy_v2": fn(Opaque) -> c_int;
            stream_query = "cuStreamQuery": fn(Opaque) -> c_int;
            stream_wait = "cuStreamWaitEvent": fn(Opaque, Opaque, c_uint) -> c_int;
            priority_range = "cuCtxGetStreamPriorityRange": fn(*mut c_int, *mut c_int) -> c_int;
            event_create = "cuEventCreate": fn(*mut Opaque, c_uint) -> c_int;
            event_record = "cuEventRecord": fn(Opaque, Opaque) -> c_int;
            event_query = "cuEventQuery": fn(Opaque) -> c_int;
            event_destroy = "cuEventDestroy_v2": fn(Opaque) -> c_int;
            alloc_async = "cuMemAllocAsync": fn(*mut u64, usize, Opaque) -> c_int;
            free_async = "cuMemFreeAsync": fn(u64, Opaque) -> c_int;
            alloc = "cuMemAlloc_v2": fn(*mut u64, usize) -> c_int;
            free = "cuMemFree_v2": fn(u64) -> c_int;
            ipc_export = "cuIpcGetMemHandle": fn(*mut IpcHandle, u64) -> c_int;
            ipc_import = "cuIpcOpenMemHandle_v2": fn(*mut u64, IpcHandle, c_uint) -> c_int;
            address_range = "cuMemGetAddressRange_v2": fn(*mut u64, *mut usize, u64) -> c_int;
            ipc_close = "cuIpcCloseMemHandle": fn(u64) -> c_int;
            ipc_export_event = "cuIpcGetEventHandle": fn(*mut IpcHandle, Opaque) -> c_int;
            ipc_import_event = "cuIpcOpenEventHandle": fn(*mut Opaque, IpcHandle) -> c_int;
            host_alloc = "cuMemHostAlloc": fn(*mut Opaque, usize, c_uint) -> c_int;
            host_free = "cuMemFreeHost": fn(Opaque) -> c_int;
            pointer_attribute = "cuPointerGetAttribute": fn(*mut c_void, c_int, u64) -> c_int;
            copy_in = "cuMemcpyHtoDAsync_v2": fn(u64, *const c_void, usize, Opaque) -> c_int;
            copy_out = "cuMemcpyDtoHAsync_v2": fn(*mut c_void, u64, usize, Opaque) -> c_int;
            copy = "cuMemcpyDtoDAsync_v2": fn(u64, u64, usize, Opaque) -> c_int;
            set8 = "cuMemsetD8Async": fn(u64, u8, usize, Opaque) -> c_int;
            set16 = "cuMemsetD16Async": fn(u64, u16, usize, Opaque) -> c_int;
            set32 = "cuMemsetD32Async": fn(u64, c_uint, usize, Opaque) -> c_int;
            set_2d32 = "cuMemsetD2D32Async": fn(u64, usize, c_uint, usize, usize, Opaque) -> c_int;
            module_load = "cuModuleLoadData": fn(*mut Opaque, *const c_void) -> c_int;
            module_function = "cuModuleGetFunction": fn(*mut Opaque, Opaque, *const c_char) -> c_int;
            launch = "cuLaunchKernel":
                fn(Opaque, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, Opaque, *mut Opaque, *mut Opaque) -> c_int;
        }
    }
}
