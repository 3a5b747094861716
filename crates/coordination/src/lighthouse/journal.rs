//! Where the job's record lies, as the actor sees it: it saves before it delivers, and asks whether it may answer; it does not know which it is.

use std::sync::Arc;

use ftcore::Result;
use protocol::quorum::Record;

use super::disk::StateFile;
use super::term::Term;

/// The job's record, on whatever it is kept.
#[derive(Debug, Clone)]
pub(crate) enum Journal {
    /// Nowhere: a restarted lighthouse believes what the replicas tell.
    Nowhere,
    /// In a file that this lighthouse has for itself for as long as it runs.
    Disk(Arc<StateFile>),
    /// In etcd, for as long as this lighthouse leads.
    Etcd(Arc<Term>),
    /// A stand-in that is told what to answer.
    #[cfg(test)]
    Scripted(Arc<super::actor::tests::Script>),
    /// The disk of a simulated host.
    #[cfg(test)]
    Simulated(crate::simulation::Disk),
}

impl Journal {
    /// Keeps `record`, before what it describes is delivered. Errors: this lighthouse may deliver nothing more. A disk that takes nothing is no
    /// such error: see [`written`](Self::written).
    pub(crate) async fn save(&self, record: &Record) -> Result<()> {
        match self {
            Self::Nowhere => Ok(()),
            Self::Disk(file) => {
                file.keep(record);
                Ok(())
            }
            Self::Etcd(term) => term.save(record).await,
            #[cfg(test)]
            Self::Scripted(script) => script.save(record),
            #[cfg(test)]
            Self::Simulated(disk) => {
                disk.keep(record);
                Ok(())
            }
        }
    }

    /// Whether the last record is written; tries again if not. Errors: no quorum may be delivered now, because a restart would not know of it.
    pub(crate) fn written(&self) -> Result<()> {
        match self {
            Self::Disk(file) => file.written(),
            Self::Nowhere | Self::Etcd(_) => Ok(()),
            #[cfg(test)]
            Self::Scripted(_) => Ok(()),
            #[cfg(test)]
            Self::Simulated(disk) => disk.written(),
        }
    }

    /// Whether this lighthouse may still answer for the job. Errors: no, or it cannot be known.
    pub(crate) async fn confirm(&self) -> Result<()> {
        match self {
            Self::Nowhere | Self::Disk(_) => Ok(()),
            Self::Etcd(term) => term.confirm().await,
            #[cfg(test)]
            Self::Scripted(script) => script.confirm(),
            #[cfg(test)]
            Self::Simulated(_) => Ok(()),
        }
    }
}
