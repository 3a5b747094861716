//! The end of this process as an operator orders it.

use std::time::Duration;

/// How long rank 0 outlives an operator's kill for the other ranks to hear of it.
const TELL_OTHERS: Duration = Duration::from_millis(200);

/// An operator ends this replica. By force: whatever holds up its training thread would hold up the end in good order as well.
pub(crate) fn end_process(reason: &str, hosts_others: bool) {
    tracing::error!("this process ends: {reason}");
    let end = move || {
        if hosts_others {
            // The other ranks hear of it over the server in this process.
            std::thread::sleep(TELL_OTHERS);
        }
        let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
    };
    // Not on the thread of the client, which serves the answers to the others.
    if std::thread::Builder::new()
        .name("ox-killed".into())
        .spawn(end)
        .is_err()
    {
        end();
    }
}
