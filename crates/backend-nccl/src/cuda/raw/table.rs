//! The driver's functions by name.

use std::ffi::{c_char, c_int, c_uint, c_void};

use super::IpcHandle;

macro_rules! table {
    ($($f:ident = $s:literal : fn($($a:ty),*);)*) => {
        pub(super) struct Table { $(pub(super) $f: unsafe extern "C" fn($($a),*) -> c_int,)* }
        impl Table {
            pub(super) fn load(library: &libloading::Library) -> std::result::Result<Self, &'static str> {
                // SAFETY: the signatures are those of the driver API's public documentation for these names.
                Ok(Self { $($f: *unsafe { library.get(concat!($s, "\0").as_bytes()) }.map_err(|_| $s)?,)* })
            }
        }
    };
}

type Opaque = *mut c_void;

table! {
    init = "cuInit": fn(c_uint);
    driver_version = "cuDriverGetVersion": fn(*mut c_int);
    error_string = "cuGetErrorString": fn(c_int, *mut *const c_char);
    device_count = "cuDeviceGetCount": fn(*mut c_int);
    device_get = "cuDeviceGet": fn(*mut c_int, c_int);
    device_name = "cuDeviceGetName": fn(*mut c_char, c_int, c_int);
    device_attribute = "cuDeviceGetAttribute": fn(*mut c_int, c_int, c_int);
    context_retain = "cuDevicePrimaryCtxRetain": fn(*mut Opaque, c_int);
    context_set = "cuCtxSetCurrent": fn(Opaque);
    context_get = "cuCtxGetCurrent": fn(*mut Opaque);
    context_device = "cuCtxGetDevice": fn(*mut c_int);
    context_synchronize = "cuCtxSynchronize": fn();
    stream_create = "cuStreamCreateWithPriority": fn(*mut Opaque, c_uint, c_int);
    stream_destroy = "cuStreamDestroy_v2": fn(Opaque);
    stream_query = "cuStreamQuery": fn(Opaque);
    stream_wait = "cuStreamWaitEvent": fn(Opaque, Opaque, c_uint);
    priority_range = "cuCtxGetStreamPriorityRange": fn(*mut c_int, *mut c_int);
    event_create = "cuEventCreate": fn(*mut Opaque, c_uint);
    event_record = "cuEventRecord": fn(Opaque, Opaque);
    event_query = "cuEventQuery": fn(Opaque);
    event_destroy = "cuEventDestroy_v2": fn(Opaque);
    alloc_async = "cuMemAllocAsync": fn(*mut u64, usize, Opaque);
    free_async = "cuMemFreeAsync": fn(u64, Opaque);
    alloc = "cuMemAlloc_v2": fn(*mut u64, usize);
    free = "cuMemFree_v2": fn(u64);
    ipc_export = "cuIpcGetMemHandle": fn(*mut IpcHandle, u64);
    ipc_import = "cuIpcOpenMemHandle_v2": fn(*mut u64, IpcHandle, c_uint);
    address_range = "cuMemGetAddressRange_v2": fn(*mut u64, *mut usize, u64);
    ipc_close = "cuIpcCloseMemHandle": fn(u64);
    ipc_export_event = "cuIpcGetEventHandle": fn(*mut IpcHandle, Opaque);
    ipc_import_event = "cuIpcOpenEventHandle": fn(*mut Opaque, IpcHandle);
    host_alloc = "cuMemHostAlloc": fn(*mut Opaque, usize, c_uint);
    host_free = "cuMemFreeHost": fn(Opaque);
    pointer_attribute = "cuPointerGetAttribute": fn(*mut c_void, c_int, u64);
    copy_in = "cuMemcpyHtoDAsync_v2": fn(u64, *const c_void, usize, Opaque);
    copy_out = "cuMemcpyDtoHAsync_v2": fn(*mut c_void, u64, usize, Opaque);
    copy = "cuMemcpyDtoDAsync_v2": fn(u64, u64, usize, Opaque);
    set8 = "cuMemsetD8Async": fn(u64, u8, usize, Opaque);
    set16 = "cuMemsetD16Async": fn(u64, u16, usize, Opaque);
    set32 = "cuMemsetD32Async": fn(u64, c_uint, usize, Opaque);
    set_2d32 = "cuMemsetD2D32Async": fn(u64, usize, c_uint, usize, usize, Opaque);
    module_load = "cuModuleLoadData": fn(*mut Opaque, *const c_void);
    module_function = "cuModuleGetFunction": fn(*mut Opaque, Opaque, *const c_char);
    launch = "cuLaunchKernel":
        fn(Opaque, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, Opaque, *mut Opaque, *mut Opaque);
}
