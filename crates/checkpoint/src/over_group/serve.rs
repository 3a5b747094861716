//! The source: answers each receiver that may ask, on a thread of its own, and holds the snapshot until all have what they asked for.
//!
//! One thread for all receivers: it submits what is to be sent, and hears on a channel what has ended. The group's engine owns the messages until then. The
//! training thread waits for none of it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use ftcore::{
    Collective, Error, ErrorKind, ProcessGroup, ProcessGroupExt, Result, SubmitOptions, Tensor, Work,
    time_left,
};

use super::messages::{Ask, Head, Named, room};
use super::{TAG_ASK, TAG_HEAD, TAG_MANIFEST, TAG_PART, has_room};
use crate::Snapshot;

/// How much longer than its deadline a group may take to end an operation.
const GRACE: Duration = Duration::from_secs(5);

/// Answers the ranks `to` of `group`, each of which asks once, for `snapshot` or for nothing. Returns at once; a thread goes on until all
/// have been answered, an operation fails (with its group), or `deadline` has passed. What ends it early aborts the group, so that no receiver
/// waits for the rest.
///
/// Errors: those of the group that refuses the first receives, and `Io` if the system gives no thread.
pub fn serve_over_group(
    group: Arc<dyn ProcessGroup>,
    snapshot: Arc<Snapshot>,
    to: Vec<u32>,
    deadline: Instant,
) -> Result<()> {
    let (tell, ended) = channel();
    let epoch = group.info().epoch;
    let mut source = Source {
        group,
        snapshot,
        deadline,
        tell,
        left: to.iter().map(|rank| (*rank, To::default())).collect(),
    };
    for rank in to {
        source.hear(rank)?;
    }
    let serve = move || {
        let id = source.snapshot.id().clone();
        if let Err(error) = source.run(&ended) {
            tracing::warn!(%error, %id, "the state did not reach all that take it over");
            // One that has failed by itself is told so where its next collective is waited for, and may be configured anew by now.
            let group = &source.group;
            if group.info().epoch == epoch && group.error().is_none() {
                group.abort(&error.to_string());
            }
        }
    };
    std::thread::Builder::new()
        .name("ox-ckpt-group".into())
        .spawn(serve)
        .map(drop)
        .map_err(|e| Error::io("starting the thread that sends a state over the group", e))
}

#[derive(Debug, Clone, Copy)]
enum What {
    Ask,
    Head,
    Manifest,
    Part,
}

struct Ended {
    rank: u32,
    what: What,
    work: Work,
}

/// One receiver.
#[derive(Debug, Default)]
struct To {
    /// It asked for the state.
    takes: bool,
    next_part: usize,
    /// Parts on their way.
    parts: usize,
    bytes: usize,
    /// Messages on their way, parts included.
    in_flight: usize,
}

struct Source {
    group: Arc<dyn ProcessGroup>,
    snapshot: Arc<Snapshot>,
    deadline: Instant,
    tell: Sender<Ended>,
    /// Those that have not got all yet.
    left: BTreeMap<u32, To>,
}

impl Source {
    fn run(&mut self, ended: &Receiver<Ended>) -> Result<()> {
        while !self.left.is_empty() {
            let limit = time_left(self.deadline) + GRACE;
            let Ok(Ended { rank, what, work }) = ended.recv_timeout(limit) else {
                let ranks: Vec<&u32> = self.left.keys().collect();
                let text = format!("ranks {ranks:?} did not take the state in time");
                return Err(Error::timeout(text));
            };
            // The message itself is dropped here: the memory of what was sent is the snapshot's.
            let tensor = work.take().map_err(|e| of_rank(rank, e))?.into_tensor()?;
            let to = self.to(rank)?;
            to.in_flight = to.in_flight.saturating_sub(1);
            match what {
                What::Ask => self.asked(rank, &tensor)?,
                What::Part => {
                    to.parts = to.parts.saturating_sub(1);
                    to.bytes = to.bytes.saturating_sub(tensor.byte_len());
                }
                What::Head | What::Manifest => {}
            }
            drop(tensor);
            self.go_on(rank)?;
        }
        Ok(())
    }

    fn to(&mut self, rank: u32) -> Result<&mut To> {
        let unknown = || Error::new(ErrorKind::Internal, format!("rank {rank} takes no state"));
        self.left.get_mut(&rank).ok_or_else(unknown)
    }

    fn asked(&mut self, rank: u32, ask: &Tensor) -> Result<()> {
        let Some(wanted) = Ask::read(ask).map_err(|e| of_rank(rank, e))?.0 else {
            return Ok(());
        };
        let holds = Named::of_snapshot(self.snapshot.id());
        let takes = wanted.takes(&holds);
        if !takes {
            tracing::warn!(rank, "asked for another state: {}", wanted.instead(&holds));
        }
        // Hashes the state for the first that takes it.
        let manifest = takes.then(|| self.snapshot.manifest_json());
        let head = Head {
            holds,
            manifest_bytes: manifest.as_ref().map_or(0, |m| m.len() as u64),
        };
        self.send(rank, What::Head, head.write())?;
        if let Some(manifest) = manifest {
            self.send(rank, What::Manifest, Tensor::from_shared(manifest))?;
            self.to(rank)?.takes = true;
        }
        Ok(())
    }

    /// The next parts, as many as may be on their way. Forgets a receiver that has all.
    fn go_on(&mut self, rank: u32) -> Result<()> {
        loop {
            let snapshot = Arc::clone(&self.snapshot);
            let to = self.to(rank)?;
            let part = snapshot.parts().get(to.next_part).filter(|_| to.takes);
            let Some(part) = part else {
                if to.in_flight == 0 {
                    self.left.remove(&rank);
                }
                return Ok(());
            };
            if !has_room(to.parts, to.bytes) {
                return Ok(());
            }
            to.next_part = to.next_part.saturating_add(1);
            // A part without bytes is no message.
            if !part.is_empty() {
                to.parts = to.parts.saturating_add(1);
                to.bytes = to.bytes.saturating_add(part.len());
                self.send(rank, What::Part, Tensor::from_shared(part.clone()))?;
            }
        }
    }

    /// Waits for what `rank` asks for.
    fn hear(&mut self, rank: u32) -> Result<()> {
        let op = Collective::Recv {
            tensor: room(),
            peer: Some(rank),
            tag: TAG_ASK,
        };
        self.start(rank, What::Ask, op)
    }

    fn send(&mut self, rank: u32, what: What, tensor: Tensor) -> Result<()> {
        let tag = match what {
            What::Ask => TAG_ASK,
            What::Head => TAG_HEAD,
            What::Manifest => TAG_MANIFEST,
            What::Part => TAG_PART,
        };
        let op = Collective::Send {
            tensor,
            peer: rank,
            tag,
        };
        self.start(rank, what, op)
    }

    fn start(&mut self, rank: u32, what: What, op: Collective) -> Result<()> {
        let work = self.group.run(op, SubmitOptions::by(self.deadline));
        let work = work.map_err(|e| of_rank(rank, e.error))?;
        let to = self.to(rank)?;
        to.in_flight = to.in_flight.saturating_add(1);
        let (tell, handle) = (self.tell.clone(), work.clone());
        work.on_complete(move |_| {
            // The thread may have ended already.
            let _ = tell.send(Ended {
                rank,
                what,
                work: handle,
            });
        });
        Ok(())
    }
}

fn of_rank(rank: u32, e: Error) -> Error {
    Error::new(e.kind(), format!("the state for rank {rank}: {e}")).with_source(e)
}
