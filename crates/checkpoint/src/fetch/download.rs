//! Which chunk comes from which source, and what happens when one fails.
//!
//! One task owns all of this state; requests are tasks that report back as [`Event`]s. The first manifest that arrives
//! is followed. Sources with the same digest join in, those with another wait in case no source of the first
//! is left; chunks that both have in common are kept then. A chunk is asked at most twice from each source, from the
//! others first. Once every chunk is on its way, sources with nothing to do repeat the requests of the others, so that
//! one that hangs does not hold up the end.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use ftcore::{Error, ErrorKind, Result};
use tokio::task::JoinSet;

use super::FetchOptions;
use super::sources::{Connection, Source, ask_chunk, ask_manifest};
use crate::manifest::Manifest;
use crate::{Snapshot, StateDict};

/// Wrong chunks after which a source is no longer asked while there are others.
const MAX_BAD_CHUNKS: u32 = 3;
const MAX_TRIES: u8 = 2;

enum Event {
    Manifest(usize, Result<(Connection, Manifest)>),
    Chunk {
        from: usize,
        index: usize,
        digest: blake3::Hash,
        connection: Option<Connection>,
        result: Result<Bytes>,
    },
}

struct Peer {
    source: Arc<Source>,
    /// Its manifest, once it answered.
    manifest: Option<Arc<Manifest>>,
    /// Why it is no longer asked.
    lost: Option<Error>,
    /// The latest failure, even if it was not the end.
    trouble: Option<Error>,
    idle: Vec<Connection>,
    in_flight: usize,
    /// Failures since the last good chunk.
    failures_in_row: usize,
    bad_chunks: u32,
}

impl Peer {
    fn usable_for(&self, manifest: &Manifest) -> bool {
        self.lost.is_none()
            && self
                .manifest
                .as_ref()
                .is_some_and(|m| m.digest() == manifest.digest())
    }
}

pub(super) struct Download {
    step: i64,
    deadline: Instant,
    options: FetchOptions,
    peers: Vec<Peer>,
    /// Sources whose URL cannot be used.
    unusable: Vec<Error>,
    tasks: JoinSet<Event>,
    /// The manifest being followed.
    manifest: Option<Arc<Manifest>>,
    chunks: Vec<Option<Bytes>>,
    /// Chunks neither here nor in flight.
    missing: BTreeSet<usize>,
    /// Chunks in flight, and from whom; of the manifest followed.
    asked: BTreeMap<usize, Vec<usize>>,
    received: usize,
    /// How often a chunk (of the manifest followed) failed at a source.
    tries: HashMap<(usize, usize), u8>,
    /// A wrong answer is more telling than a lost connection: the first one is kept for the final error.
    first_corrupt: Option<Error>,
}

impl Download {
    pub(super) fn new(sources: &[String], step: i64, deadline: Instant, options: FetchOptions) -> Self {
        let (mut peers, mut unusable) = (Vec::new(), Vec::new());
        for url in sources {
            match Source::parse(url) {
                Ok(source) => peers.push(Peer {
                    source: Arc::new(source),
                    manifest: None,
                    lost: None,
                    trouble: None,
                    idle: Vec::new(),
                    in_flight: 0,
                    failures_in_row: 0,
                    bad_chunks: 0,
                }),
                Err(e) => unusable.push(e),
            }
        }
        Self {
            step,
            deadline,
            options,
            peers,
            unusable,
            tasks: JoinSet::new(),
            manifest: None,
            chunks: Vec::new(),
            missing: BTreeSet::new(),
            asked: BTreeMap::new(),
            received: 0,
            tries: HashMap::new(),
            first_corrupt: None,
        }
    }

    /// Runs until the state is here, no source is left, or the deadline has passed.
    pub(super) async fn run(mut self) -> Result<(i64, StateDict)> {
        for (i, peer) in self.peers.iter().enumerate() {
            let (source, options) = (Arc::clone(&peer.source), self.options.clone());
            let (step, deadline) = (self.step, self.deadline.into());
            self.tasks.spawn(async move {
                Event::Manifest(i, ask_manifest(&source, step, deadline, &options).await)
            });
        }
        loop {
            if let Some(done) = self.finished() {
                return Ok(done);
            }
            self.start_requests();
            if self.stuck() {
                if self.follow_another() {
                    continue;
                }
                if self.waiting_for_manifests() == 0 {
                    return Err(self.failure());
                }
            }
            let Ok(event) = tokio::time::timeout_at(self.deadline.into(), self.tasks.join_next()).await
            else {
                return Err(self.too_late());
            };
            match event {
                Some(Ok(Event::Manifest(from, result))) => self.on_manifest(from, result),
                Some(Ok(Event::Chunk {
                    from,
                    index,
                    digest,
                    connection,
                    result,
                })) => {
                    self.on_chunk(from, index, digest, connection, result);
                }
                Some(Err(e)) => {
                    return Err(Error::new(
                        ErrorKind::Internal,
                        format!("a download task ended: {e}"),
                    ));
                }
                // Nothing in flight: the next round starts something, follows another source, or fails.
                None => {}
            }
        }
    }

    /// The state, if all chunks are here and it can be decoded. Otherwise whoever served it is given up.
    fn finished(&mut self) -> Option<(i64, StateDict)> {
        let manifest = self.manifest.clone()?;
        if self.received < manifest.chunk_count() {
            return None;
        }
        let chunks = std::mem::take(&mut self.chunks).into_iter().flatten().collect();
        match Snapshot::restore(&manifest, chunks) {
            Ok(state) => Some((manifest.epoch(), state)),
            Err(e) => {
                for peer in self.peers.iter_mut().filter(|p| p.usable_for(&manifest)) {
                    peer.lost = Some(Error::new(
                        e.kind(),
                        format!("{}: {}", peer.source.url, e.message()),
                    ));
                }
                self.note_corrupt(&e);
                self.manifest = None;
                self.missing.clear();
                self.asked.clear();
                self.received = 0;
                None
            }
        }
    }

    fn start_requests(&mut self) {
        let Some(manifest) = self.manifest.clone() else {
            return;
        };
        for from in 0..self.peers.len() {
            while let Some(index) = self.next_chunk_for(from, &manifest) {
                let Some(peer) = self.peers.get_mut(from) else {
                    break;
                };
                self.missing.remove(&index);
                self.asked.entry(index).or_default().push(from);
                peer.in_flight += 1;
                let (source, connection) = (Arc::clone(&peer.source), peer.idle.pop());
                let (manifest, stall) = (Arc::clone(&manifest), self.options.stall_timeout);
                self.tasks.spawn(async move {
                    let digest = manifest.digest();
                    let (connection, result) = ask_chunk(&source, connection, &manifest, index, stall).await;
                    Event::Chunk {
                        from,
                        index,
                        digest,
                        connection,
                        result,
                    }
                });
            }
        }
    }

    /// The first missing chunk that `from` has not failed yet, or has failed once like every other source. If none is
    /// missing, one that was asked for only once.
    fn next_chunk_for(&self, from: usize, manifest: &Manifest) -> Option<usize> {
        let peer = self.peers.get(from)?;
        if !peer.usable_for(manifest) || peer.in_flight >= self.options.connections_per_source {
            return None;
        }
        let tries = |index, at| self.tries.get(&(index, at)).copied().unwrap_or(0);
        let others_failed = |index| {
            let mut others = self
                .peers
                .iter()
                .enumerate()
                .filter(|(i, p)| *i != from && p.usable_for(manifest));
            others.all(|(i, _)| tries(index, i) > 0)
        };
        let missing = self
            .missing
            .iter()
            .copied()
            .find(|index| match tries(*index, from) {
                0 => true,
                n => n < MAX_TRIES && others_failed(*index),
            });
        missing.or_else(|| {
            // A connection that is open may also overtake one of the same source that is still waiting to be accepted.
            let may = |by: &[usize]| by.len() == 1 && (!by.contains(&from) || !peer.idle.is_empty());
            let mut single = self.asked.iter().filter(|(_, by)| may(by));
            single
                .find(|(index, _)| tries(**index, from) == 0)
                .map(|(index, _)| *index)
        })
    }

    /// True if no chunk is on its way and none could be started: there is no manifest, or its sources are used up.
    fn stuck(&self) -> bool {
        self.peers.iter().all(|p| p.in_flight == 0)
    }

    fn waiting_for_manifests(&self) -> usize {
        self.peers
            .iter()
            .filter(|p| p.manifest.is_none() && p.lost.is_none())
            .count()
    }

    /// Gives up the manifest followed so far and takes that of another source. False if there is none.
    fn follow_another(&mut self) -> bool {
        if let Some(old) = &self.manifest {
            for peer in self.peers.iter_mut().filter(|p| p.usable_for(old)) {
                let trouble = peer.trouble.clone();
                peer.lost = Some(trouble.unwrap_or_else(|| {
                    Error::new(
                        ErrorKind::PeerLost,
                        format!("{}: no chunk left to try", peer.source.url),
                    )
                }));
                peer.idle.clear();
            }
        }
        let next = self
            .peers
            .iter()
            .find_map(|p| p.manifest.clone().filter(|_| p.lost.is_none()));
        match next {
            Some(manifest) => {
                self.follow(manifest);
                true
            }
            None => false,
        }
    }

    /// Follows `manifest`, keeping chunks that it has in common with the one before.
    fn follow(&mut self, manifest: Arc<Manifest>) {
        let old_chunks = std::mem::take(&mut self.chunks);
        let old = self.manifest.take();
        let keeps = |i: usize| {
            old.as_ref().is_some_and(|o| {
                o.chunk_bytes() == manifest.chunk_bytes() && o.chunk_hash(i) == manifest.chunk_hash(i)
            })
        };
        // No allocation by announced size beyond one pointer per hash that the manifest really carries.
        let mut old_chunks = old_chunks.into_iter();
        self.chunks = (0..manifest.chunk_count())
            .map(|i| old_chunks.next().flatten().filter(|_| keeps(i)))
            .collect();
        self.missing = (0..)
            .zip(&self.chunks)
            .filter(|(_, c)| c.is_none())
            .map(|(i, _)| i)
            .collect();
        self.received = manifest.chunk_count() - self.missing.len();
        self.tries.clear();
        self.asked.clear();
        tracing::debug!(
            step = self.step,
            epoch = manifest.epoch(),
            bytes = manifest.total_bytes(),
            missing = self.missing.len(),
            "following a manifest"
        );
        self.manifest = Some(manifest);
    }

    fn on_manifest(&mut self, from: usize, result: Result<(Connection, Manifest)>) {
        let Some(peer) = self.peers.get_mut(from) else {
            return;
        };
        match result {
            Ok((connection, manifest)) => {
                let manifest = Arc::new(manifest);
                peer.manifest = Some(Arc::clone(&manifest));
                // Kept open even if another manifest is followed: it makes us a reader there.
                peer.idle.push(connection);
                if self.manifest.is_none() {
                    self.follow(manifest);
                }
            }
            Err(e) => {
                tracing::warn!(step = self.step, "checkpoint source not used: {e}");
                self.note_corrupt(&e);
                if let Some(peer) = self.peers.get_mut(from) {
                    peer.lost = Some(e);
                }
            }
        }
    }

    fn on_chunk(
        &mut self,
        from: usize,
        index: usize,
        digest: blake3::Hash,
        connection: Option<Connection>,
        result: Result<Bytes>,
    ) {
        let Some(peer) = self.peers.get_mut(from) else {
            return;
        };
        peer.in_flight = peer.in_flight.saturating_sub(1);
        peer.idle.extend(connection);
        let current = self.manifest.as_ref().is_some_and(|m| m.digest() == digest);
        let mut also_asked = false;
        if current && let Some(by) = self.asked.get_mut(&index) {
            if let Some(at) = by.iter().position(|i| *i == from) {
                by.swap_remove(at);
            }
            also_asked = !by.is_empty();
            if !also_asked {
                self.asked.remove(&index);
            }
        }
        let e = match result {
            Ok(chunk) => {
                peer.failures_in_row = 0;
                if let Some(slot) = self.chunks.get_mut(index).filter(|c| current && c.is_none()) {
                    *slot = Some(chunk);
                    self.received += 1;
                    // A repeated request may still be on its way; it is not missed.
                    self.asked.remove(&index);
                }
                return;
            }
            Err(e) => e,
        };
        tracing::warn!(step = self.step, chunk = index, "checkpoint chunk failed: {e}");
        peer.trouble = Some(e.clone());
        peer.failures_in_row += 1;
        if e.kind() == ErrorKind::Corrupt {
            peer.bad_chunks += 1;
        }
        let gone = match e.kind() {
            // Counted per chunk; below, per source.
            ErrorKind::Corrupt => false,
            // One failure for every connection may be one event; one more is not.
            ErrorKind::PeerLost | ErrorKind::Unavailable => {
                peer.failures_in_row > self.options.connections_per_source
            }
            _ => true,
        };
        let distrusted = peer.bad_chunks >= MAX_BAD_CHUNKS;
        if current {
            *self.tries.entry((index, from)).or_default() += 1;
            let here = self.chunks.get(index).is_none_or(Option::is_some);
            if !here && !also_asked {
                self.missing.insert(index);
            }
        }
        self.note_corrupt(&e);
        let has_others = self.manifest.as_ref().is_some_and(|m| {
            self.peers
                .iter()
                .enumerate()
                .any(|(i, p)| i != from && p.usable_for(m))
        });
        if gone || (distrusted && has_others) {
            tracing::warn!(step = self.step, "checkpoint source given up: {e}");
            if let Some(peer) = self.peers.get_mut(from) {
                peer.idle.clear();
                peer.lost = Some(e);
            }
        }
    }

    fn note_corrupt(&mut self, e: &Error) {
        if e.kind() == ErrorKind::Corrupt && self.first_corrupt.is_none() {
            self.first_corrupt = Some(e.clone());
        }
    }

    /// The most telling reason first, then what each source said.
    fn failure(&self) -> Error {
        let reasons: Vec<&Error> = self
            .peers
            .iter()
            .filter_map(|p| p.lost.as_ref())
            .chain(&self.unusable)
            .collect();
        let of_kind = |k: ErrorKind| reasons.iter().copied().find(|e| e.kind() == k);
        let first = self.first_corrupt.as_ref().or_else(|| {
            [ErrorKind::PeerLost, ErrorKind::Unavailable, ErrorKind::NotFound]
                .into_iter()
                .find_map(of_kind)
        });
        let kind = first
            .or(reasons.first().copied())
            .map_or(ErrorKind::Unavailable, Error::kind);
        let mut texts: Vec<String> = Vec::new();
        for e in first.into_iter().chain(reasons) {
            let text = e.to_string();
            if !texts.contains(&text) {
                texts.push(text);
            }
        }
        Error::new(
            kind,
            format!("{}: no source is left: {}", self.progress(), texts.join("; ")),
        )
    }

    fn too_late(&self) -> Error {
        let said: Vec<String> = self
            .peers
            .iter()
            .map(|p| match (&p.lost, &p.trouble, &p.manifest) {
                (Some(e), ..) | (None, Some(e), _) => e.to_string(),
                (None, None, Some(_)) => format!("{}: was being read", p.source.url),
                (None, None, None) => format!("{}: has not published the step", p.source.url),
            })
            .chain(self.unusable.iter().map(Error::to_string))
            .collect();
        Error::timeout(format!(
            "{} when the deadline passed: {}",
            self.progress(),
            said.join("; ")
        ))
    }

    fn progress(&self) -> String {
        match &self.manifest {
            Some(m) => format!(
                "step {}, {} of {} chunks received",
                self.step,
                self.received,
                m.chunk_count()
            ),
            None => format!("step {}, no manifest received", self.step),
        }
    }
}
