//! Flight records on a signal, for programs that want them: a library installs no handlers by itself.

use ftcore::{Error, Result, flight_recorder};
use signal_hook::consts::SIGUSR2;
use signal_hook::iterator::Signals;

/// From now on this process writes its flight record whenever it gets SIGUSR2, into the folder of `OXCCL_FLIGHT_RECORDER_DIR` or the current
/// one ([`flight_recorder::dump`]); `oxccl launch` passes the signal on to all ranks. Call it once, early: before that the signal ends the process.
///
/// Errors: `Io` if the signal cannot be caught or there is no thread for it.
pub fn dump_on_signal() -> Result<()> {
    let mut signals = Signals::new([SIGUSR2]).map_err(|e| Error::io("catch SIGUSR2", e))?;
    std::thread::Builder::new()
        .name("ox-records".into())
        .spawn(move || {
            for _ in signals.forever() {
                match flight_recorder::dump("SIGUSR2") {
                    Ok(path) => tracing::info!(path = %path.display(), "the flight record is written"),
                    Err(error) => tracing::warn!(%error, "the flight record could not be written"),
                }
            }
        })
        .map_err(|e| Error::io("start thread ox-records", e))?;
    Ok(())
}
