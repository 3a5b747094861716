//! The configuration of one member of a group, watched for news that it cannot have itself.
//!
//! An abort that comes before a member has begun to connect finds nothing to end there, and a peer that is lost may show on another
//! member's connections only. A thread looks for both while the member connects, and aborts it as often as it takes.

use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use ftcore::{Configuration, Error, ErrorKind, ProcessGroup, Result};

/// How often the thread looks.
const LOOK: Duration = Duration::from_millis(20);
/// After the failure of another member this one gets so long to hear of it by itself, and perhaps more.
const GRACE: Duration = Duration::from_millis(300);

/// Configures `group`; ends that early once `cancelled` says why, or a little after `failed` does. Both look only, and are asked again and again.
///
/// Errors: the group's own, unless it was ended for what `cancelled` or `failed` say: then that.
pub(crate) fn watched(
    group: &dyn ProcessGroup,
    configuration: Configuration,
    cancelled: &(dyn Fn() -> Option<Error> + Sync),
    failed: &(dyn Fn() -> Option<Error> + Sync),
) -> Result<()> {
    if configuration.world_size == 1 {
        return group.configure(configuration);
    }
    let configured = std::thread::scope(|scope| {
        // Held until the group is configured.
        let (configuring, over) = channel::<()>();
        let watch = move || {
            let mut since = None;
            while over.recv_timeout(LOOK) == Err(RecvTimeoutError::Timeout) {
                let why = cancelled().or_else(|| {
                    let error = failed()?;
                    let since = *since.get_or_insert_with(Instant::now);
                    (since.elapsed() >= GRACE).then_some(error)
                });
                if let Some(why) = why {
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
        ErrorKind::Aborted => cancelled().or_else(failed).unwrap_or(error),
        _ => error,
    })
}
