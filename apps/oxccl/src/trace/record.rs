//! A flight record as its process wrote it (`ftcore::flight_recorder`), and how it is read.

use std::fmt::Write as _;
use std::path::Path;

use oxccl::core::{Error, ErrorKind, Result};
use serde::Deserialize;

/// What this version reads.
const VERSION: u32 = 1;

/// One process's record.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct Record {
    format: String,
    version: u32,
    pub(crate) host: String,
    pub(crate) pid: u32,
    /// The number that the launcher gave the process.
    pub(crate) rank: Option<u32>,
    pub(crate) replica: Option<String>,
    /// What caused the record.
    pub(crate) why: String,
    pub(crate) written_ns: u64,
    pub(crate) groups: Vec<Group>,
}

/// One group of that process, over all its configurations.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct Group {
    /// Operations that the ring has no more.
    pub(crate) overwritten: u64,
    pub(crate) configurations: Vec<Configuration>,
    pub(crate) operations: Vec<Operation>,
}

#[derive(Debug, Clone, Deserialize)]
pub(crate) struct Configuration {
    pub(crate) epoch: u64,
    pub(crate) name: String,
    pub(crate) prefix: String,
    pub(crate) rank: u32,
    pub(crate) world: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum State {
    Queued,
    Running,
    Done,
    Failed,
    Refused,
}

#[derive(Debug, Clone, Deserialize)]
pub(crate) struct Operation {
    pub(crate) epoch: u64,
    pub(crate) seq: u64,
    pub(crate) op: String,
    pub(crate) dtype: Option<String>,
    pub(crate) input: u64,
    pub(crate) output: u64,
    pub(crate) bytes: u64,
    pub(crate) reduce: Option<String>,
    pub(crate) tensors: Option<u32>,
    pub(crate) root: Option<u32>,
    pub(crate) peer: Option<u32>,
    pub(crate) tag: Option<u32>,
    /// Elements, where all ranks must have as many.
    pub(crate) agreed: Option<u64>,
    /// A hash of the counts tensor by tensor.
    pub(crate) parts: Option<String>,
    pub(crate) state: State,
    pub(crate) submitted_ns: u64,
    pub(crate) started_ns: Option<u64>,
    pub(crate) ended_ns: Option<u64>,
    pub(crate) reason: Option<String>,
}

impl Operation {
    /// True for messages, which are ordered by peer and tag and not among the collectives.
    pub(crate) fn is_message(&self) -> bool {
        matches!(self.op.as_str(), "send" | "recv" | "batch")
    }

    /// The operation with what the ranks must agree on: `all_reduce(f32, 1024 elements, sum)`.
    pub(crate) fn described(&self) -> String {
        let mut parts = Vec::new();
        parts.extend(self.dtype.clone());
        match self.agreed {
            Some(n) => parts.push(format!("{n} elements")),
            None if self.input + self.output > 0 => {
                parts.push(format!("{} elements in, {} out", self.input, self.output));
            }
            None => {}
        }
        if let Some(n) = self.tensors.filter(|n| *n != 1) {
            parts.push(format!("{n} tensors"));
        }
        parts.extend(self.reduce.clone());
        parts.extend(self.root.map(|r| format!("root {r}")));
        parts.extend(self.peer.map(|r| format!("peer {r}")));
        parts.extend(self.tag.filter(|t| *t != 0).map(|t| format!("tag {t}")));
        let mut text = self.op.clone();
        if !parts.is_empty() {
            let _ = write!(text, "({})", parts.join(", "));
        }
        text
    }
}

impl Record {
    /// Reads a file. Errors: `Io`; `Corrupt` for what is no flight record, `Unsupported` for one of a later version, with the path.
    pub(crate) fn read(path: &Path) -> Result<Self> {
        let text = std::fs::read(path)
            .map_err(|e| Error::invalid(format!("cannot read {}: {e}", path.display())))?;
        Self::parse(&text).map_err(|e| Error::new(e.kind(), format!("{}: {}", path.display(), e.message())))
    }

    pub(crate) fn parse(text: &[u8]) -> Result<Self> {
        let record: Self = serde_json::from_slice(text)
            .map_err(|e| Error::new(ErrorKind::Corrupt, format!("this is no flight record: {e}")))?;
        if record.format != "oxccl flight record" {
            return Err(Error::new(ErrorKind::Corrupt, "this is no flight record"));
        }
        if record.version != VERSION {
            return Err(Error::unsupported(format!(
                "a flight record of version {}; this oxccl reads version {VERSION}",
                record.version
            )));
        }
        Ok(record)
    }

    /// The process, for people.
    pub(crate) fn process(&self) -> String {
        let mut text = format!("pid {} on {}", self.pid, self.host);
        if let Some(replica) = &self.replica {
            let _ = write!(text, ", replica {replica}");
        }
        if let Some(rank) = self.rank {
            let _ = write!(text, ", launched as rank {rank}");
        }
        text
    }
}
