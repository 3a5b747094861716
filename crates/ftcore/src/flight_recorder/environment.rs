//! What the environment says of records. Read when a group is made, not when it connects or fails: a vendor's library may write to the
//! environment on a thread of its own meanwhile, and no lock of ours holds C's `setenv` up.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, Once, PoisonError};

/// Operations that a ring holds unless `OXCCL_FLIGHT_RECORDER` says how many.
pub(super) const LENGTH: usize = 512;
/// The most that may be asked for.
pub(super) const MAX_LENGTH: usize = 1 << 20;

/// What the environment says of records.
#[derive(Debug)]
pub(super) struct Said {
    /// The length of each group's ring; 0 is off.
    pub(super) length: usize,
    /// Where failures are written.
    pub(super) folder: Option<PathBuf>,
    /// The number that the launcher gave this process, where it gave one.
    pub(super) rank: Option<u32>,
    pub(super) replica: Option<String>,
}

impl Said {
    pub(super) fn now() -> Self {
        let text = |name: &str| std::env::var(name).ok();
        Self {
            length: asked(text("OXCCL_FLIGHT_RECORDER").as_deref()),
            folder: std::env::var_os("OXCCL_FLIGHT_RECORDER_DIR")
                .filter(|folder| !folder.is_empty())
                .map(PathBuf::from),
            rank: ["RANK", "OXCCL_RANK"]
                .iter()
                .find_map(|name| text(name)?.parse().ok()),
            replica: text("OXCCL_REPLICA"),
        }
    }
}

pub(super) static SAID: Mutex<Option<Arc<Said>>> = Mutex::new(None);

/// A group is being made.
pub(crate) fn read_environment() {
    *SAID.lock().unwrap_or_else(PoisonError::into_inner) = Some(Arc::new(Said::now()));
}

/// What was read last; before there is a group, what stands there now.
pub(super) fn said() -> Arc<Said> {
    let said = SAID.lock().unwrap_or_else(PoisonError::into_inner).clone();
    said.unwrap_or_else(|| Arc::new(Said::now()))
}

pub(super) fn asked(text: Option<&str>) -> usize {
    match text.map(str::trim) {
        None | Some("") => LENGTH,
        Some(text) => match text.parse::<usize>() {
            Ok(length) => length.min(MAX_LENGTH),
            Err(_) => {
                static WARNED: Once = Once::new();
                WARNED.call_once(|| {
                    tracing::warn!(
                        text,
                        "OXCCL_FLIGHT_RECORDER is neither 0 (off) nor a number of operations; {LENGTH} are kept"
                    );
                });
                LENGTH
            }
        },
    }
}
