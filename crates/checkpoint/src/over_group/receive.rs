//! The receiver: asks one source for the state, takes it in part by part, and checks every chunk of it.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use ftcore::{
    Collective, DType, Epoch, Error, ErrorKind, ProcessGroup, ProcessGroupExt, Result, Status, Step,
    SubmitOptions, Tensor, Work, deadline_in, time_left,
};

use super::messages::{Ask, Head, Named, room};
use super::{TAG_ASK, TAG_HEAD, TAG_MANIFEST, TAG_PART, has_room};
use crate::fetch::{FetchOptions, Fetched, Reach, SourceChoice};
use crate::hashing::hash_all;
use crate::manifest::Manifest;
use crate::{Snapshot, SnapshotId};

/// So often a wait looks whether it is still wanted.
const LOOK: Duration = Duration::from_millis(200);

/// A member of the group that has the state.
#[derive(Debug, Clone)]
pub struct GroupSource {
    /// Its rank in the group.
    pub rank: u32,
    /// What errors call it; the same in each epoch.
    pub name: String,
}

/// Sources that sent what cannot be used, by name: they come last in the next fetch that is given a clone of this.
#[derive(Debug, Clone, Default)]
pub struct Distrusted(Arc<Mutex<BTreeSet<String>>>);

impl Distrusted {
    fn has(&self, name: &str) -> bool {
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .contains(name)
    }

    fn add(&self, name: &str) {
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .insert(name.to_owned());
    }

    /// All are trusted again.
    pub fn clear(&self) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }
}

/// A state to be fetched over the group of the epoch, from one of several members, all of which run
/// [`serve_over_group`](super::serve_over_group) for this rank.
pub struct GroupFetch<'a> {
    /// The group, configured for `epoch`.
    pub group: &'a dyn ProcessGroup,
    /// The members that have it, the preferred one first. Each is told whether it is the one.
    pub sources: Vec<GroupSource>,
    /// The step.
    pub step: Step,
    /// The epoch in which the snapshot is taken.
    pub epoch: Epoch,
    /// The history that led to it; `None`: any.
    pub lineage: Option<String>,
    /// Who decides which source is followed, if not their order.
    pub choice: Option<Arc<dyn SourceChoice>>,
    /// Sources that sent what cannot be used before.
    pub distrusted: Distrusted,
    /// Asked a few times a second while this waits: an error ends the fetch.
    pub watch: &'a dyn Fn() -> Result<()>,
}

impl fmt::Debug for GroupFetch<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GroupFetch")
            .field("sources", &self.sources)
            .field("step", &self.step)
            .field("epoch", &self.epoch)
            .finish_non_exhaustive()
    }
}

impl GroupFetch<'_> {
    /// Fetches the state from one source, whole: neither an older state nor an earlier fetch saves anything.
    ///
    /// Of `options` the limits of state and manifest count. Errors: `Timeout` when the deadline passes; `Corrupt` naming source and chunk if a hash
    /// does not fit, or the manifest is of another state; `NotFound` if no source holds the state that is asked for; `Protocol` for what is beyond
    /// the limits or no such message; the group's own error, naming the source, if it fails. After an error messages may be on their way still: the
    /// caller aborts the group.
    pub fn run(&self, deadline: Instant, options: &FetchOptions) -> Result<Fetched> {
        self.fetch(deadline, options)
            .map_err(|e| e.with_op("checkpoint.fetch_over_group"))
    }

    fn fetch(&self, deadline: Instant, options: &FetchOptions) -> Result<Fetched> {
        if self.sources.is_empty() || self.step < Step(0) {
            return Err(Error::invalid(format!(
                "fetching step {} from {} sources",
                self.step,
                self.sources.len()
            )));
        }
        let mut lost: BTreeMap<usize, Error> = BTreeMap::new();
        let (place, source, manifest_bytes) = loop {
            let place = self.choose(&lost, deadline)?;
            let Some(source) = self.sources.get(place) else {
                let text = format!("source {place} was chosen, of {}", self.sources.len());
                return Err(Error::new(ErrorKind::Internal, text));
            };
            match self.ask(source, deadline)? {
                Ok(manifest_bytes) => break (place, source, manifest_bytes),
                Err(other) => {
                    tracing::warn!(step = %self.step, "checkpoint source given up: {other}");
                    lost.insert(place, other);
                }
            }
        };
        for (i, other) in self.sources.iter().enumerate() {
            if i != place && !lost.contains_key(&i) {
                // It is read by a thread that waits for it, and is not waited for here.
                self.send(other, Ask(None).write(), deadline)?;
            }
        }
        let manifest = self.manifest(source, manifest_bytes, deadline, options)?;
        let parts = self.parts(source, &manifest, deadline)?;
        let received = manifest_bytes.saturating_add(manifest.total_bytes());
        let state = Snapshot::restore(&manifest, parts).map_err(|e| self.blamed(source, e))?;
        if let Some(choice) = &self.choice
            && !choice.settle(&[place], deadline)?
        {
            let text = format!(
                "the other ranks follow another source than {} by now",
                source.name
            );
            return Err(Error::new(ErrorKind::Aborted, text));
        }
        Ok(Fetched {
            id: manifest.id().clone(),
            state,
            followed: vec![place],
            received: vec![(source.name.clone(), received)],
            reused_bytes: 0,
        })
    }

    /// The source to ask: not one that refused, and one that is distrusted only if there is no other.
    fn choose(&self, lost: &BTreeMap<usize, Error>, deadline: Instant) -> Result<usize> {
        let open = || (0..self.sources.len()).filter(|i| !lost.contains_key(i));
        let is_trusted = |i: &usize| {
            let source = self.sources.get(*i);
            source.is_some_and(|s| !self.distrusted.has(&s.name))
        };
        let mut have: Vec<usize> = open().filter(is_trusted).collect();
        if have.is_empty() {
            have = open().collect();
        }
        let all_lost = || {
            let all: Vec<String> = lost.values().map(ToString::to_string).collect();
            Error::new(ErrorKind::NotFound, all.join("; "))
        };
        let Some(choice) = &self.choice else {
            return have.first().copied().ok_or_else(all_lost);
        };
        if have.is_empty() {
            return Err(all_lost());
        }
        let reach = Reach {
            lost: (0..self.sources.len()).filter(|i| !have.contains(i)).collect(),
            have,
            pending: Vec::new(),
        };
        loop {
            match choice.follow(&reach, deadline)? {
                Some(place) => match lost.get(&place) {
                    None => return Ok(place),
                    Some(e) => {
                        let text = format!(
                            "the other ranks follow a source that this one could not: {e}; the next attempt prefers another source"
                        );
                        return Err(Error::new(ErrorKind::PeerLost, text).with_source(e.clone()));
                    }
                },
                None if time_left(deadline).is_zero() => {
                    return Err(Error::timeout(
                        "the ranks of this replica chose no source in time",
                    ));
                }
                None => {
                    (self.watch)()?;
                    std::thread::park_timeout(LOOK.min(time_left(deadline)));
                }
            }
        }
    }

    /// Asks `source` for the state: the length of its manifest, or what it holds instead.
    fn ask(&self, source: &GroupSource, deadline: Instant) -> Result<Result<u64>> {
        let wanted = Named::of(self.step, self.epoch, self.lineage.as_deref());
        let head = self.receive(source, room(), TAG_HEAD, deadline)?;
        self.send(source, Ask(Some(wanted)).write(), deadline)?;
        let head = self.taken(source, &head, deadline)?;
        let head = Head::read(&head).map_err(|e| self.blamed(source, e))?;
        if wanted.takes(&head.holds) {
            return Ok(Ok(head.manifest_bytes));
        }
        let text = wanted.instead(&head.holds);
        Ok(Err(self.blamed(source, Error::new(ErrorKind::NotFound, text))))
    }

    fn manifest(
        &self,
        source: &GroupSource,
        bytes: u64,
        deadline: Instant,
        options: &FetchOptions,
    ) -> Result<Manifest> {
        let blamed = |e| self.blamed(source, e);
        let limit = options.max_manifest_bytes;
        let length = usize::try_from(bytes).ok().filter(|n| *n <= limit);
        let length = length.ok_or_else(|| {
            let text = format!("a manifest of {bytes} bytes, {limit} are allowed (max_manifest_bytes)");
            blamed(Error::new(ErrorKind::Protocol, text))
        })?;
        let json = self.receive(source, Tensor::zeros(DType::U8, length), TAG_MANIFEST, deadline)?;
        let json = self.taken(source, &json, deadline)?;
        let manifest = Manifest::parse(json.bytes(), options.max_state_bytes).map_err(blamed)?;
        let SnapshotId { step, epoch, lineage } = manifest.id();
        let is_wanted = (*step, *epoch) == (self.step, self.epoch)
            && self.lineage.as_ref().is_none_or(|wanted| wanted == lineage);
        if !is_wanted {
            let text = format!(
                "the manifest is of {}, asked for step {} of epoch {} (lineage: {})",
                manifest.id(),
                self.step,
                self.epoch,
                self.lineage.as_deref().unwrap_or("any")
            );
            return Err(self.blamed(source, Error::new(ErrorKind::Corrupt, text)));
        }
        Ok(manifest)
    }

    /// The parts of the state, each checked.
    fn parts(&self, source: &GroupSource, manifest: &Manifest, deadline: Instant) -> Result<Vec<Bytes>> {
        let none = || {
            let text = format!("no memory for a state of {} bytes", manifest.total_bytes());
            Error::new(ErrorKind::Unavailable, text)
        };
        // The size is a peer's word, and the allocations below cannot fail in an orderly way: asked for in vain first.
        let total = usize::try_from(manifest.total_bytes()).map_err(|_| none())?;
        Vec::<u8>::new().try_reserve_exact(total).map_err(|_| none())?;
        let mut coming: VecDeque<(usize, Work)> = VecDeque::new();
        let (mut next, mut bytes) = (0usize, 0usize);
        let mut parts: Vec<Bytes> = vec![Bytes::new(); manifest.parts().len()];
        loop {
            while let Some(length) = manifest
                .parts()
                .get(next)
                .filter(|_| has_room(coming.len(), bytes))
            {
                let length = usize::try_from(*length).map_err(|_| none())?;
                if length > 0 {
                    let room = Tensor::zeros(DType::U8, length);
                    coming.push_back((next, self.receive(source, room, TAG_PART, deadline)?));
                    bytes = bytes.saturating_add(length);
                }
                next = next.saturating_add(1);
            }
            let Some((part, work)) = coming.pop_front() else {
                return Ok(parts);
            };
            let data = self.taken(source, &work, deadline)?;
            bytes = bytes.saturating_sub(data.byte_len());
            let data = data.into_vec::<u8>().map_err(Error::from)?;
            self.check(source, manifest, part, &data)?;
            if let Some(place) = parts.get_mut(part) {
                *place = data.into();
            }
        }
    }

    /// Every chunk of a part against the manifest.
    fn check(&self, source: &GroupSource, manifest: &Manifest, part: usize, data: &[u8]) -> Result<()> {
        let size = usize::try_from(manifest.chunk_bytes())
            .unwrap_or(usize::MAX)
            .max(1);
        let pieces: Vec<&[u8]> = data.chunks(size).collect();
        let indices = manifest.chunks_of(part);
        for ((index, piece), found) in indices.zip(&pieces).zip(hash_all(&pieces)) {
            let expected = manifest.chunk_hash(index);
            if (expected, manifest.chunk_len(index)) != (Some(found), Some(piece.len())) {
                let expected = expected.map_or_else(|| "no such chunk".into(), |h| h.to_hex().to_string());
                let text = format!(
                    "{}, chunk {index} of {}: {} bytes with hash {found}, the manifest says {expected}",
                    manifest.id(),
                    manifest.chunk_count(),
                    piece.len()
                );
                return Err(self.blamed(source, Error::new(ErrorKind::Corrupt, text)));
            }
        }
        Ok(())
    }

    fn receive(&self, source: &GroupSource, tensor: Tensor, tag: u32, deadline: Instant) -> Result<Work> {
        let op = Collective::Recv {
            tensor,
            peer: Some(source.rank),
            tag,
        };
        self.group
            .run(op, SubmitOptions::by(deadline))
            .map_err(|e| self.blamed(source, e.error))
    }

    fn send(&self, source: &GroupSource, tensor: Tensor, deadline: Instant) -> Result<()> {
        let op = Collective::Send {
            tensor,
            peer: source.rank,
            tag: TAG_ASK,
        };
        self.group
            .run(op, SubmitOptions::by(deadline))
            .map(drop)
            .map_err(|e| self.blamed(source, e.error))
    }

    /// Waits for a receive, as long as it is wanted.
    fn taken(&self, source: &GroupSource, work: &Work, deadline: Instant) -> Result<Tensor> {
        loop {
            let outcome = work.wait(deadline_in(LOOK).min(deadline));
            if !matches!(work.status(), Status::Pending) {
                let done = work.take().and_then(ftcore::Completion::into_tensor);
                return done.map_err(|e| self.blamed(source, e));
            }
            if let Err(e) = outcome
                && time_left(deadline).is_zero()
            {
                return Err(self.blamed(source, e));
            }
            (self.watch)()?;
        }
    }

    /// `source` is named. If it sent what does not fit, the next fetch asks another one first.
    fn blamed(&self, source: &GroupSource, e: Error) -> Error {
        if matches!(e.kind(), ErrorKind::Corrupt | ErrorKind::Protocol) {
            self.distrusted.add(&source.name);
        }
        let text = format!(
            "{} (rank {} of the group): {}",
            source.name,
            source.rank,
            e.message()
        );
        Error::new(e.kind(), text).with_source(e)
    }
}
