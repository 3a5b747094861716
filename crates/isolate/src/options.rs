//! What an isolated group is made of: the backend in the child, its options, the program that the child runs.

use std::path::PathBuf;
use std::time::Duration;

use ftcore::{Device, Error, ErrorKind, GroupOptions, Result};

/// Names a program that the children run instead of this one; it must call [`run_child_if_asked`](crate::run_child_if_asked)
/// and have the backend linked in or loaded. `oxccl` itself is one.
pub const ENV_HELPER: &str = "OXCCL_ISOLATE_HELPER";
/// Set in a child: the parent's process id. Not for users.
pub(crate) const ENV_CHILD: &str = "OXCCL_ISOLATE_CHILD";

/// This very executable, in the forked child too.
const OWN_PROGRAM: &str = "/proc/self/exe";

/// Which program a child runs.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Helper {
    /// The one that `OXCCL_ISOLATE_HELPER` names, else this very executable started again.
    #[default]
    Auto,
    /// This one. It knows only the backends that are linked into it or that it loads before it calls
    /// [`run_child_if_asked`](crate::run_child_if_asked).
    Program(PathBuf),
}

impl Helper {
    /// The program's path.
    pub(crate) fn program(&self) -> Result<PathBuf> {
        match self {
            Self::Program(path) => Ok(path.clone()),
            Self::Auto => match std::env::var_os(ENV_HELPER).filter(|p| !p.is_empty()) {
                Some(path) => Ok(path.into()),
                // Not the resolved path: this one stays valid when the file is replaced (a new build) while this runs.
                None if std::fs::exists(OWN_PROGRAM).unwrap_or(false) => Ok(OWN_PROGRAM.into()),
                None => std::env::current_exe().map_err(|e| {
                    Error::new(
                        ErrorKind::NotFound,
                        format!("this program's file is not known ({e}); set {ENV_HELPER}"),
                    )
                }),
            },
        }
    }
}

/// How to make an [`IsolatedGroup`](crate::IsolatedGroup).
#[derive(Debug, Clone, PartialEq)]
pub struct IsolateOptions {
    /// The backend's name in the child's registry.
    pub backend: String,
    /// The device; of the child and of the caller's tensors.
    pub device: Device,
    /// Given to the backend unchanged; what it does not honour, it refuses (INV-9).
    pub options: GroupOptions,
    /// Keep a second child ready, with the backend loaded, so that a `configure` after an abort or a crash costs no
    /// process start. It takes the memory of an idle process with the library loaded.
    pub spare: bool,
    /// How long a child may take from its start until its backend is loaded.
    pub start_timeout: Duration,
    /// The program of the child.
    pub helper: Helper,
}

impl IsolateOptions {
    /// `backend` on `device` with the default options, no spare, and 30 s for the start.
    pub fn new(backend: impl Into<String>, device: Device) -> Self {
        Self {
            backend: backend.into(),
            device,
            options: GroupOptions::default(),
            spare: false,
            start_timeout: Duration::from_secs(30),
            helper: Helper::Auto,
        }
    }
}
