//! Tells the manager server of failures without making a caller wait (L27): the first error of an epoch goes out at
//! once from its own thread, and the lighthouse pushes it to the other members.

use std::sync::{Arc, mpsc};
use std::time::Duration;

use coordination::ManagerClient;
use ftcore::{Epoch, Error, Result, deadline_in};

use crate::observed::Observed;

/// A failure of an epoch, in words.
pub(crate) struct Report {
    pub(crate) quorum_id: Epoch,
    pub(crate) reason: String,
}

/// The sending side; cheap to clone into completion callbacks.
#[derive(Clone)]
pub(crate) struct Reporter(mpsc::SyncSender<Report>, Arc<Observed>);

impl Reporter {
    /// Starts the thread; it ends when the last sender is gone.
    pub(crate) fn start(client: Arc<ManagerClient>, observed: Arc<Observed>) -> Result<Self> {
        let (sender, receiver) = mpsc::sync_channel::<Report>(64);
        std::thread::Builder::new()
            .name("ox-report".into())
            .spawn(move || {
                while let Ok(report) = receiver.recv() {
                    let deadline = deadline_in(Duration::from_secs(2));
                    if let Err(error) = client.report(report.quorum_id, &report.reason, deadline) {
                        tracing::debug!(%error, epoch = %report.quorum_id, "a failure could not be reported");
                    }
                }
            })
            .map_err(|e| Error::io("starting the report thread", e))?;
        Ok(Self(sender, observed))
    }

    /// Never blocks: with 64 reports waiting, one more says nothing new.
    pub(crate) fn send(&self, quorum_id: Epoch, error: &Error) {
        self.1.failed(quorum_id, error);
        let _ = self.0.try_send(Report {
            quorum_id,
            reason: error.to_string(),
        });
    }
}
