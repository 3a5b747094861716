//! The configuration of a group, watched for news that the group cannot have itself.
//!
//! An abort that comes before a group has begun to connect finds nothing to end there. Whoever hears news from elsewhere (a lighthouse, the
//! other members of a group) says why the configuration is in vain, and a thread aborts it as often as it takes.

use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use crate::{Configuration, Error, ErrorKind, ProcessGroup, Result};

/// How often the thread looks.
const LOOK: Duration = Duration::from_millis(20);

/// Configures `group`, and ends that early once `in_vain` says why: it is asked before, every 20 ms, and looks only.
///
/// Errors: the group's own; what `in_vain` says if that ended it; `Io` if no thread starts.
pub fn configure_watched(
    group: &dyn ProcessGroup,
    configuration: Configuration,
    in_vain: &(dyn Fn() -> Option<Error> + Sync),
) -> Result<()> {
    if let Some(error) = in_vain() {
        return Err(error);
    }
    if configuration.world_size == 1 {
        return group.configure(configuration);
    }
    let configured = std::thread::scope(|scope| {
        // Held until the group is configured.
        let (configuring, over) = channel::<()>();
        let watch = move || {
            while over.recv_timeout(LOOK) == Err(RecvTimeoutError::Timeout) {
                if let Some(why) = in_vain() {
                    group.abort(&why.to_string());
                }
            }
        };
        std::thread::Builder::new()
            .name("ox-watch".to_string())
            .spawn_scoped(scope, watch)
            .map_err(|e| Error::io("cannot start the thread ox-watch", e))?;
        let configured = group.configure(configuration);
        drop(configuring);
        configured
    });
    configured.map_err(|error| match error.kind() {
        ErrorKind::Aborted => in_vain().unwrap_or(error),
        _ => error,
    })
}
