//! NVRTC, the compiler of CUDA C as a library, opened at run time: six functions, and where it is looked for.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::ptr;
use std::sync::Mutex;

use ftcore::registry::Unavailable;
use ftcore::{Error, ErrorKind, Result};
use vendor::{Opened, Symbols, functions};

/// Names the library, or the folder that holds it.
const ENV_PATH: &str = "OXCCL_NVRTC_PATH";

/// Newest first; the last is what a distribution's development package has.
const FILES: [&str; 3] = ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"];

/// Where the wheels lie in a folder of Python packages: that of CUDA 13, and that of CUDA 12.
const IN_PACKAGES: [&str; 2] = ["nvidia/cu13/lib", "nvidia/cuda_nvrtc/lib"];

const TOOLKIT: &str = "/usr/local/cuda/lib64";

type Program = *mut c_void;

functions! {
    struct Table {
        required {
            version = "nvrtcVersion": fn(*mut c_int, *mut c_int) -> c_int;
            create = "nvrtcCreateProgram":
                fn(*mut Program, *const c_char, *const c_char, c_int, *const *const c_char, *const *const c_char) -> c_int;
            compile = "nvrtcCompileProgram": fn(Program, c_int, *const *const c_char) -> c_int;
            destroy = "nvrtcDestroyProgram": fn(*mut Program) -> c_int;
            log_size = "nvrtcGetProgramLogSize": fn(Program, *mut usize) -> c_int;
            log = "nvrtcGetProgramLog": fn(Program, *mut c_char) -> c_int;
            cubin_size = "nvrtcGetCUBINSize": fn(Program, *mut usize) -> c_int;
            cubin = "nvrtcGetCUBIN": fn(Program, *mut c_char) -> c_int;
        }
    }
}

/// `--gpu-architecture` was not understood.
const INVALID_OPTION: c_int = 5;

/// The library.
pub(crate) struct Nvrtc {
    table: Table,
    path: String,
    version: (c_int, c_int),
}

/// The library; a failure is not kept. Errors: `Unsupported` says where it was looked for.
pub(crate) fn get() -> Result<&'static Nvrtc> {
    static FOUND: Mutex<Option<&'static Nvrtc>> = Mutex::new(None);
    let mut found = FOUND.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    if let Some(nvrtc) = *found {
        return Ok(nvrtc);
    }
    // Never closed: the driver of a process does not forget what was compiled either.
    let nvrtc: &'static Nvrtc = Box::leak(Box::new(Nvrtc::find()?));
    *found = Some(nvrtc);
    Ok(nvrtc)
}

/// The files to try, in order; a bare name is the loader's search.
fn candidates() -> Vec<PathBuf> {
    let in_folder = |folder: &Path| FILES.map(|f| folder.join(f)).into_iter().filter(|f| f.is_file());
    if let Some(named) = std::env::var_os(ENV_PATH).filter(|v| !v.is_empty()) {
        let named = PathBuf::from(named);
        if !named.is_dir() {
            return vec![named];
        }
        let found: Vec<_> = in_folder(&named).collect();
        return if found.is_empty() {
            vec![named.join(FILES[0])]
        } else {
            found
        };
    }
    // NVIDIA's wheels lie side by side: `<packages>/nvidia/nccl/lib/libnccl.so.2`.
    let packages = nccl_sys::locate::candidates();
    let packages = packages.iter().filter_map(|nccl| nccl.ancestors().nth(4));
    let folders = packages.flat_map(|p| IN_PACKAGES.map(|i| p.join(i)));
    let mut found: Vec<PathBuf> = folders.flat_map(|f| in_folder(&f).collect::<Vec<_>>()).collect();
    found.extend(FILES.map(PathBuf::from));
    found.extend(in_folder(Path::new(TOOLKIT)));
    found
}

impl Nvrtc {
    fn find() -> Result<Self> {
        let candidates = candidates();
        let mut last = String::new();
        for path in &candidates {
            match Self::open(path) {
                Ok(nvrtc) => return Ok(nvrtc),
                Err(why) => last = why.to_string(),
            }
        }
        Err(Error::unsupported(format!(
            "NVRTC, which compiles the kernels that quantise on CUDA devices, was not found: {last}. Install the wheel nvidia-cuda-nvrtc \
             (nvidia-cuda-nvrtc-cu12 for CUDA 12), or set {ENV_PATH} to its folder"
        )))
    }

    fn open(path: &Path) -> std::result::Result<Self, Unavailable> {
        let load = |path: &Path| {
            // SAFETY: NVRTC's initialisers ask nothing of the caller.
            unsafe { Opened::new(path, Symbols::Own) }
        };
        // It opens its headers by name alone, so they must be there already where the loader does not look.
        for builtins in path.parent().into_iter().flat_map(builtins_in) {
            let _ = load(&builtins);
        }
        let opened = load(path)?;
        // SAFETY: the signatures are those of NVRTC's public documentation for these names.
        let table = unsafe { Table::look_up(&opened)? };
        let mut version = (0, 0);
        // SAFETY: writes two ints into the variable that this call borrows.
        unsafe { (table.version)(&raw mut version.0, &raw mut version.1) };
        Ok(Self {
            table,
            path: path.display().to_string(),
            version,
        })
    }

    /// The version and the file.
    pub(crate) fn describe(&self) -> String {
        format!("NVRTC {}.{} ({})", self.version.0, self.version.1, self.path)
    }

    /// Machine code of `source` for an architecture such as `sm_90`.
    pub(crate) fn compile(&self, source: &str, architecture: &str) -> Result<Vec<u8>> {
        let text = |s: &str| CString::new(s).map_err(|_| Error::invalid("a text with a zero byte"));
        let (source, file) = (text(source)?, text("quantise.cu")?);
        let options = [
            text(&format!("--gpu-architecture={architecture}"))?,
            // What IEEE says, and nothing together.
            text("--fmad=false")?,
            text("--ftz=false")?,
            text("--prec-div=true")?,
        ];
        let options = options.each_ref().map(|o| o.as_ptr());
        let mut program: Program = ptr::null_mut();
        let none = ptr::null();
        // SAFETY: reads two texts that end with a zero and writes one handle.
        let code =
            unsafe { (self.table.create)(&raw mut program, source.as_ptr(), file.as_ptr(), 0, none, none) };
        if code != 0 {
            return Err(self.failed("nvrtcCreateProgram", code, ""));
        }
        let compiled = self.compiled(program, &options, architecture);
        // SAFETY: made above, destroyed once.
        unsafe { (self.table.destroy)(&raw mut program) };
        compiled
    }

    fn compiled(&self, program: Program, options: &[*const c_char], architecture: &str) -> Result<Vec<u8>> {
        let count = c_int::try_from(options.len()).unwrap_or(0);
        // SAFETY: the program is alive; reads that many texts.
        let code = unsafe { (self.table.compile)(program, count, options.as_ptr()) };
        if code == INVALID_OPTION {
            return Err(Error::unsupported(format!(
                "{} does not compile for {architecture}: {}",
                self.describe(),
                self.log(program)
            )));
        }
        if code != 0 {
            return Err(self.failed("nvrtcCompileProgram", code, &self.log(program)));
        }
        let mut size = 0;
        // SAFETY: writes one size into the variable that this call borrows.
        let code = unsafe { (self.table.cubin_size)(program, &raw mut size) };
        if code != 0 {
            return Err(self.failed("nvrtcGetCUBINSize", code, ""));
        }
        let mut image = vec![0u8; size];
        // SAFETY: writes as many bytes as it said.
        let code = unsafe { (self.table.cubin)(program, image.as_mut_ptr().cast()) };
        match code {
            0 => Ok(image),
            code => Err(self.failed("nvrtcGetCUBIN", code, "")),
        }
    }

    /// What the compiler said.
    fn log(&self, program: Program) -> String {
        let mut size = 0;
        // SAFETY: writes one size into the variable that this call borrows.
        if unsafe { (self.table.log_size)(program, &raw mut size) } != 0 || size == 0 {
            return String::new();
        }
        let mut log = vec![0u8; size];
        // SAFETY: writes as many bytes as it said, the last of them zero.
        unsafe { (self.table.log)(program, log.as_mut_ptr().cast()) };
        let log = CStr::from_bytes_until_nul(&log).map(CStr::to_string_lossy);
        log.map(|l| l.trim().to_string()).unwrap_or_default()
    }

    fn failed(&self, call: &str, code: c_int, log: &str) -> Error {
        let text = format!("{}: {call}: {log}", self.describe());
        Error::new(ErrorKind::Backend, text).with_code(i64::from(code))
    }
}

/// `libnvrtc-builtins.so.13.0` and the like in a folder.
fn builtins_in(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    entries
        .filter(|e| {
            let name = e.file_name().to_string_lossy().into_owned();
            name.starts_with("libnvrtc-builtins.so")
        })
        .map(|e| e.path())
        .collect()
}
