//! Which chunk comes from which source, and what happens when one fails.
//!
//! One task owns all of this state; look-ups and requests are tasks that report back as [`Event`]s. The first manifest that
//! arrives is followed, or the one that the choice names (`choosing.rs`). Sources with the same one join in; one with another for the same
//! state is left out. A source takes as many chunks at once as it brings in a moment, so that a slower one gets less.
//! A request that stands still is repeated elsewhere, so that a source that hangs does not hold up the end.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use ftcore::{Error, ErrorKind, Result};
use tokio::sync::{Notify, mpsc};

use super::assembly::{Assembly, Slot};
use super::choosing::Choosing;
use super::sources::{Connection, Ended, Source, Wanted, ask_chunks, ask_manifest};
use super::{CheckpointSource, Fetch, FetchOptions, Fetched, Kept};
use crate::StateDict;
use crate::manifest::Manifest;

/// What a request should take: long enough that its round trip does not count, short enough that the last ones end together.
const REQUEST: Duration = Duration::from_millis(250);

/// The most bytes of one request, unless a single chunk has more.
const MAX_REQUEST_BYTES: u64 = 8 << 20;

/// The most chunks of one request.
const MAX_REQUEST_CHUNKS: usize = 256;

/// A request that brought no chunk for this long is repeated by the source that has nothing else to do.
const STANDSTILL: Duration = Duration::from_millis(200);

/// When all chunks are here: how long sources that have not told their manifest yet may still vouch for it.
const AGREEMENT: Duration = Duration::from_secs(1);

/// The first pause before a source that failed is asked again; it doubles.
const PAUSE: Duration = Duration::from_millis(50);

pub(super) enum Event {
    Manifest(usize, Result<(Arc<Source>, Connection, Manifest)>),
    Chosen(Result<Option<usize>>),
    Chunk { request: u64, slot: Slot },
    Ended { request: u64, ended: Ended },
}

pub(super) struct Peer {
    pub(super) name: String,
    source: Option<Arc<Source>>,
    /// What it serves instead of what is wanted, while it is waited for.
    said: Arc<Mutex<Option<String>>>,
    pub(super) manifest: Option<Arc<Manifest>>,
    /// Its manifest is the one that is followed.
    pub(super) agreed: bool,
    /// Why it is no longer asked.
    pub(super) lost: Option<Error>,
    /// The latest failure, even if it was not the end.
    trouble: Option<Error>,
    idle: Vec<Connection>,
    in_flight: usize,
    /// Failures since the last good chunk.
    failures_in_row: u32,
    /// Not asked before then.
    pause_until: Option<Instant>,
    /// Bytes that it brought.
    received: u64,
    /// Bytes per second over one connection, as last seen.
    rate: Option<f64>,
}

impl Peer {
    fn pending(&self) -> bool {
        self.manifest.is_none() && self.lost.is_none()
    }

    fn usable(&self, now: Instant, connections: usize) -> bool {
        self.agreed
            && self.lost.is_none()
            && self.in_flight < connections
            && self.pause_until.is_none_or(|until| until <= now)
    }
}

struct Request {
    peer: usize,
    /// What it still has to bring.
    chunks: BTreeSet<usize>,
    /// Its slots are the chunks' places.
    in_place: bool,
    begun: Instant,
    progress: Instant,
    received: u64,
    cancel: Arc<Notify>,
}

pub(super) struct Download {
    wanted: Wanted,
    own: Option<StateDict>,
    kept: Kept,
    pub(super) choosing: Option<Choosing>,
    pub(super) deadline: Instant,
    pub(super) options: FetchOptions,
    pub(super) peers: Vec<Peer>,
    to_find: Vec<CheckpointSource>,
    pub(super) sender: mpsc::UnboundedSender<Event>,
    events: mpsc::UnboundedReceiver<Event>,
    pub(super) assembly: Option<Assembly>,
    requests: BTreeMap<u64, Request>,
    next_request: u64,
    complete_since: Option<Instant>,
}

impl Download {
    pub(super) fn new(fetch: Fetch, deadline: Instant, options: FetchOptions) -> Self {
        let peer = |s: &CheckpointSource| Peer {
            name: s.name.clone(),
            source: None,
            said: Arc::default(),
            manifest: None,
            agreed: false,
            lost: None,
            trouble: None,
            idle: Vec::new(),
            in_flight: 0,
            failures_in_row: 0,
            pause_until: None,
            received: 0,
            rate: None,
        };
        let (sender, events) = mpsc::unbounded_channel();
        Self {
            peers: fetch.sources.iter().map(peer).collect(),
            to_find: fetch.sources,
            wanted: Wanted {
                step: fetch.step,
                epoch: fetch.epoch,
                lineage: fetch.lineage,
            },
            own: fetch.own,
            kept: fetch.kept,
            choosing: fetch.choice.map(Choosing::new),
            deadline,
            options,
            sender,
            events,
            assembly: None,
            requests: BTreeMap::new(),
            next_request: 0,
            complete_since: None,
        }
    }

    /// Runs until the state is here, no source is left, or the deadline has passed. What came before a failure is kept for the next fetch.
    pub(super) async fn run(mut self) -> Result<Fetched> {
        match self.complete().await {
            Ok(()) => self.finish().await,
            Err(e) => {
                let chunks = self.assembly.take().map(Assembly::into_chunks);
                self.kept.put(chunks.unwrap_or_default());
                Err(e)
            }
        }
    }

    async fn complete(&mut self) -> Result<()> {
        self.ask_for_manifests();
        loop {
            let now = Instant::now();
            self.consult(now);
            if self.may_finish(now) {
                if self.settled().await? {
                    return Ok(());
                }
                continue;
            }
            self.start_requests(now);
            if self.nothing_left() {
                return Err(self.failure());
            }
            let until = self.next_look(now).min(self.deadline);
            match tokio::time::timeout_at(until.into(), self.events.recv()).await {
                Ok(Some(event)) => self.on_event(event)?,
                // `sender` is ours: the channel does not close.
                Ok(None) => return Err(Error::new(ErrorKind::Internal, "the download's tasks ended")),
                Err(_) if Instant::now() >= self.deadline => return Err(self.too_late()),
                Err(_) => {}
            }
        }
    }

    fn ask_for_manifests(&mut self) {
        for (from, source) in std::mem::take(&mut self.to_find).into_iter().enumerate() {
            let CheckpointSource {
                name,
                expected,
                locate,
            } = source;
            let (wanted, deadline, options) = (self.wanted.clone(), self.deadline, self.options.clone());
            let said = self
                .peers
                .get(from)
                .map(|p| Arc::clone(&p.said))
                .unwrap_or_default();
            let sender = self.sender.clone();
            tokio::spawn(async move {
                let ask = async {
                    // It may block, on the network or on a name.
                    let found = tokio::task::spawn_blocking(move || locate(deadline)).await;
                    let url = found.map_err(|e| {
                        let what = format!("{name}: looking it up ended: {e}");
                        Error::new(ErrorKind::Internal, what)
                    })?;
                    let url = url.map_err(|e| {
                        let what = format!("{name}: {e}");
                        Error::new(e.kind(), what).with_source(e)
                    })?;
                    let source =
                        Arc::new(Source::parse(&name, &url)?.called_by(options.party.clone(), expected)?);
                    let (connection, manifest) =
                        ask_manifest(&source, &wanted, deadline.into(), &options, &said).await?;
                    Ok((source, connection, manifest))
                };
                let result = ask.await;
                // The download may have ended.
                let _ = sender.send(Event::Manifest(from, result));
            });
        }
    }

    fn on_event(&mut self, event: Event) -> Result<()> {
        match event {
            Event::Manifest(from, result) => self.on_manifest(from, result)?,
            Event::Chosen(chosen) => self.on_chosen(chosen)?,
            Event::Chunk { request, slot } => self.on_chunk(request, slot),
            Event::Ended { request, ended } => self.on_ended(request, ended),
        }
        Ok(())
    }

    fn on_manifest(
        &mut self,
        from: usize,
        result: Result<(Arc<Source>, Connection, Manifest)>,
    ) -> Result<()> {
        let (source, connection, manifest) = match result {
            Ok(found) => found,
            Err(e) => {
                self.lose(from, e);
                return Ok(());
            }
        };
        let manifest = Arc::new(manifest);
        let followed = self.assembly.as_ref().map(|a| Arc::clone(a.manifest()));
        let same = followed.as_ref().map(|f| f.digest() == manifest.digest());
        if let (Some(followed), Some(false), None) = (&followed, same, &self.choosing) {
            if followed.id() != manifest.id() {
                let what = format!("it serves {}, {} is being fetched", manifest.id(), followed.id());
                self.lose(from, source.error(ErrorKind::NotFound, what));
                return Ok(());
            }
            let what = format!(
                "its {} is not bitwise the one that is being fetched",
                manifest.id()
            );
            self.lose(from, source.error(ErrorKind::NotFound, what));
            return Ok(());
        }
        if let Some(peer) = self.peers.get_mut(from) {
            peer.source = Some(source);
            peer.manifest = Some(Arc::clone(&manifest));
            peer.agreed = same == Some(true);
            // It also makes us a reader there.
            peer.idle.push(connection);
        }
        if same.is_none() && self.choosing.is_none() {
            self.follow(&manifest)?;
        }
        Ok(())
    }

    /// Fetches the state of `manifest` from all who have it. Of a state that was followed before, the chunks that both have are kept.
    pub(super) fn follow(&mut self, manifest: &Arc<Manifest>) -> Result<()> {
        tracing::debug!(id = %manifest.id(), bytes = manifest.total_bytes(), "following a manifest");
        for request in std::mem::take(&mut self.requests).into_values() {
            request.cancel.notify_one();
        }
        for peer in &mut self.peers {
            peer.agreed = peer
                .manifest
                .as_ref()
                .is_some_and(|m| m.digest() == manifest.digest());
            peer.in_flight = 0;
        }
        self.complete_since = None;
        let before = self
            .assembly
            .take()
            .map_or_else(|| self.kept.take(), Assembly::into_chunks);
        // May hash a whole state of ours; the other tasks go on meanwhile.
        let assembly = Assembly::new(Arc::clone(manifest), self.own.take(), before)?;
        self.assembly = Some(assembly);
        Ok(())
    }

    fn on_chunk(&mut self, id: u64, slot: Slot) {
        let Some(request) = self.requests.get_mut(&id) else {
            return;
        };
        let now = Instant::now();
        request.chunks.remove(&slot.index);
        request.progress = now;
        request.received = request.received.saturating_add(slot.length as u64);
        let (bytes, in_place) = (slot.length as u64, request.in_place);
        if let Some(peer) = self.peers.get_mut(request.peer) {
            peer.failures_in_row = 0;
            peer.received = peer.received.saturating_add(bytes);
        }
        if let Some(assembly) = &mut self.assembly {
            assembly.arrived(slot, in_place);
        }
    }

    fn on_ended(&mut self, id: u64, ended: Ended) {
        let Some(request) = self.requests.remove(&id) else {
            return;
        };
        let seconds = request.begun.elapsed().as_secs_f64();
        let Some(peer) = self.peers.get_mut(request.peer) else {
            return;
        };
        peer.in_flight = peer.in_flight.saturating_sub(1);
        if request.received > 0 {
            peer.rate = Some(request.received as f64 / seconds.max(1e-6));
        }
        if peer.lost.is_none() {
            peer.idle.extend(ended.connection);
        }
        if let Some(assembly) = &mut self.assembly {
            let elsewhere = |index: usize| self.requests.values().any(|r| r.chunks.contains(&index));
            for slot in ended.left {
                let missed = !elsewhere(slot.index);
                assembly.give_back(slot, request.in_place, missed);
            }
        }
        match ended.result {
            Err(e) if e.kind() != ErrorKind::Aborted => self.on_failure(request.peer, e),
            _ => {}
        }
    }

    fn on_failure(&mut self, from: usize, e: Error) {
        let Some(peer) = self.peers.get_mut(from) else {
            return;
        };
        if peer.lost.is_some() {
            return;
        }
        tracing::warn!(
            step = %self.wanted.step,
            "a request to a checkpoint source failed: {e}"
        );
        let may_pass = matches!(e.kind(), ErrorKind::PeerLost | ErrorKind::Unavailable);
        peer.failures_in_row = peer.failures_in_row.saturating_add(1);
        // One failure for every connection may be one event; one more is not.
        let limit = u32::try_from(self.options.connections_per_source).unwrap_or(u32::MAX);
        if may_pass && peer.failures_in_row <= limit {
            let doublings = peer.failures_in_row.saturating_sub(1).min(4);
            peer.pause_until = Some(Instant::now() + PAUSE * 2u32.pow(doublings));
            peer.trouble = Some(e);
            // They may be as broken as that one.
            peer.idle.clear();
        } else {
            self.lose(from, e);
        }
    }

    /// A source is not asked again in this download. What it sent before and fitted its hash stays.
    fn lose(&mut self, from: usize, e: Error) {
        tracing::warn!(step = %self.wanted.step, "checkpoint source given up: {e}");
        for request in self.requests.values().filter(|r| r.peer == from) {
            request.cancel.notify_one();
        }
        if let Some(peer) = self.peers.get_mut(from) {
            peer.idle.clear();
            peer.lost = Some(e);
        }
    }

    fn start_requests(&mut self, now: Instant) {
        let connections = self.options.connections_per_source;
        // One request for each source before the second for any: all begin at once.
        for round in 1..=connections {
            for from in 0..self.peers.len() {
                let usable = |p: &Peer| p.in_flight < round && p.usable(now, connections);
                if !self.peers.get(from).is_some_and(usable) {
                    continue;
                }
                let (mut slots, mut in_place) = (self.take_missing(from), true);
                if slots.is_empty() {
                    (slots, in_place) = (self.repeat(from, now), false);
                }
                if !slots.is_empty() {
                    self.request(from, slots, in_place, now);
                }
            }
        }
    }

    /// The next chunks for `from`: as many as it brings in a moment.
    fn take_missing(&mut self, from: usize) -> Vec<Slot> {
        let (Some(peer), Some(assembly)) = (self.peers.get(from), &mut self.assembly) else {
            return Vec::new();
        };
        let moment = peer.rate.map_or(0.0, |rate| rate * REQUEST.as_secs_f64());
        let mut slots = Vec::new();
        let mut bytes = 0u64;
        while slots.len() < MAX_REQUEST_CHUNKS {
            let next = assembly.next_missing();
            let Some(slot) = next else { break };
            bytes = bytes.saturating_add(slot.length as u64);
            slots.push(slot);
            if bytes >= MAX_REQUEST_BYTES || bytes as f64 >= moment {
                break;
            }
        }
        slots
    }

    /// Chunks of a request that stands still, asked for once more: from another source, or over a connection that is open
    /// where the first one may not have been accepted yet.
    fn repeat(&self, from: usize, now: Instant) -> Vec<Slot> {
        let (Some(peer), Some(assembly)) = (self.peers.get(from), &self.assembly) else {
            return Vec::new();
        };
        if assembly.has_missing() {
            return Vec::new();
        }
        let asked = |index: usize| {
            let by = self.requests.values().filter(|r| r.chunks.contains(&index));
            by.count()
        };
        let stands = |r: &&Request| now.saturating_duration_since(r.progress) >= STANDSTILL;
        let mut standing = self.requests.values().filter(stands).filter(|r| {
            let elsewhere = r.peer != from || !peer.idle.is_empty();
            elsewhere && r.chunks.iter().any(|i| !assembly.is_done(*i) && asked(*i) == 1)
        });
        let Some(request) = standing.next() else {
            return Vec::new();
        };
        let wanted = request.chunks.iter().copied();
        let wanted = wanted.filter(|i| !assembly.is_done(*i) && asked(*i) == 1);
        let mut bytes = 0u64;
        wanted
            .take_while(|index| {
                let within = bytes < MAX_REQUEST_BYTES;
                bytes = bytes.saturating_add(assembly.manifest().chunk_len(*index).unwrap_or(0) as u64);
                within
            })
            .filter_map(|index| assembly.again(index))
            .collect()
    }

    fn request(&mut self, from: usize, slots: Vec<Slot>, in_place: bool, now: Instant) {
        let (Some(peer), Some(assembly)) = (self.peers.get_mut(from), &self.assembly) else {
            return;
        };
        let Some(source) = peer.source.clone() else { return };
        let request = self.next_request;
        self.next_request = request.wrapping_add(1);
        peer.in_flight = peer.in_flight.saturating_add(1);
        let cancel = Arc::new(Notify::new());
        let chunks = slots.iter().map(|s| s.index).collect();
        self.requests.insert(
            request,
            Request {
                peer: from,
                chunks,
                in_place,
                begun: now,
                progress: now,
                received: 0,
                cancel: Arc::clone(&cancel),
            },
        );
        let (connection, manifest) = (peer.idle.pop(), Arc::clone(assembly.manifest()));
        let (sender, stall) = (self.sender.clone(), self.options.stall_timeout);
        tokio::spawn(async move {
            let done = |slot| {
                // The download may have ended.
                let _ = sender.send(Event::Chunk { request, slot });
            };
            let ended = ask_chunks(&source, connection, &manifest, slots, (stall, &cancel), done).await;
            let _ = sender.send(Event::Ended { request, ended });
        });
    }

    fn may_finish(&mut self, now: Instant) -> bool {
        let open = self.choosing.as_ref().is_some_and(Choosing::is_open);
        if open || !self.assembly.as_ref().is_some_and(Assembly::is_complete) {
            return false;
        }
        let since = *self.complete_since.get_or_insert(now);
        self.agreed().len() > 1
            || !self.peers.iter().any(Peer::pending)
            || now.saturating_duration_since(since) >= AGREEMENT
    }

    /// Sources that vouch for the manifest and were not caught with wrong bytes.
    pub(super) fn agreed(&self) -> Vec<usize> {
        let honest = |p: &Peer| p.agreed && p.lost.as_ref().is_none_or(|e| e.kind() != ErrorKind::Corrupt);
        let peers = self.peers.iter().enumerate();
        peers.filter(|(_, p)| honest(p)).map(|(i, _)| i).collect()
    }

    async fn finish(mut self) -> Result<Fetched> {
        // Repeated requests: what they hold is wanted back, at once.
        for request in self.requests.values() {
            request.cancel.notify_one();
        }
        while !self.requests.is_empty() {
            match tokio::time::timeout_at(self.deadline.into(), self.events.recv()).await {
                Ok(Some(event)) => self.on_event(event)?,
                // What is still out is here a second time, beside its place.
                Ok(None) | Err(_) => break,
            }
        }
        let followed = self.agreed();
        let names: Vec<&str> = self
            .peers
            .iter()
            .filter(|p| p.agreed)
            .map(|p| p.name.as_str())
            .collect();
        let none = || Error::new(ErrorKind::Internal, "a download without a manifest is complete");
        let assembly = self.assembly.take().ok_or_else(none)?;
        let (id, reused_bytes) = (assembly.manifest().id().clone(), assembly.reused_bytes());
        let state = assembly.finish().map_err(|e| {
            // All hashes fit: it is what they serve, and no argument of ours.
            let what = format!("{id} from {}: {}", names.join(", "), e.message());
            Error::new(from_peer(e.kind()), what).with_source(e)
        })?;
        Ok(Fetched {
            id,
            state,
            followed,
            received: self
                .peers
                .iter()
                .filter(|p| p.received > 0)
                .map(|p| (p.name.clone(), p.received))
                .collect(),
            reused_bytes,
        })
    }

    /// True if no chunk is on its way and no source may still answer or be asked again.
    fn nothing_left(&self) -> bool {
        self.requests.is_empty() && self.peers.iter().all(|p| p.lost.is_some())
    }

    /// When something changes by itself: a pause ends, a request stands still, a wait for agreement is over.
    fn next_look(&self, now: Instant) -> Instant {
        let pauses = self
            .peers
            .iter()
            .filter_map(|p| p.pause_until)
            .filter(|until| *until > now);
        let stands = self
            .requests
            .values()
            .map(|r| r.progress + STANDSTILL)
            .filter(|at| *at > now);
        // Long over where the choice is still open.
        let agreement = self.complete_since.map(|since| since + AGREEMENT);
        let choice = self.choosing.as_ref().and_then(Choosing::next_look);
        pauses
            .chain(stands)
            .chain(agreement.filter(|at| *at > now))
            .chain(choice.filter(|at| *at > now))
            .min()
            .unwrap_or(self.deadline)
    }

    /// The most telling reason first, then what each source said.
    fn failure(&self) -> Error {
        let reasons: Vec<&Error> = self.peers.iter().filter_map(|p| p.lost.as_ref()).collect();
        let of_kind = |k: ErrorKind| reasons.iter().copied().find(|e| e.kind() == k);
        let first = [
            ErrorKind::Corrupt,
            ErrorKind::PeerLost,
            ErrorKind::Unavailable,
            ErrorKind::NotFound,
        ]
        .into_iter()
        .find_map(of_kind)
        .or(reasons.first().copied());
        let kind = first.map_or(ErrorKind::Unavailable, |e| from_peer(e.kind()));
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
        let said = |p: &Peer| {
            let label = p.source.as_ref().map_or(p.name.as_str(), |s| s.label());
            let instead = p.said.lock().unwrap_or_else(PoisonError::into_inner).clone();
            match (&p.lost, &p.trouble, p.agreed, instead) {
                (Some(e), ..) | (None, Some(e), ..) => e.to_string(),
                (None, None, true, _) => format!("{label}: was being read"),
                (None, None, false, _) if p.manifest.is_some() => {
                    format!("{label}: has it, and the ranks of this replica follow another source")
                }
                (None, None, false, Some(text)) => format!("{label}: has not published it ({text})"),
                (None, None, false, None) => format!("{label}: has not published it, or does not answer"),
            }
        };
        let said: Vec<String> = self.peers.iter().map(said).collect();
        Error::timeout(format!(
            "{} when the deadline passed: {}",
            self.progress(),
            said.join("; ")
        ))
    }

    fn progress(&self) -> String {
        match &self.assembly {
            Some(a) => format!(
                "{}, {} of {} chunks received",
                self.wanted,
                a.done(),
                a.manifest().chunk_count()
            ),
            None => format!("{}, no manifest received", self.wanted),
        }
    }
}

/// What a peer sent is never our own wrong argument, nor something that we do not offer.
fn from_peer(kind: ErrorKind) -> ErrorKind {
    match kind {
        ErrorKind::InvalidArgument | ErrorKind::Unsupported => ErrorKind::Protocol,
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_download_that_is_complete_and_waits_for_the_choice_sleeps_until_there_is_something_to_do() {
        let fetch = Fetch::step(ftcore::Step(5), Vec::new());
        let begun = Instant::now();
        let deadline = begun + Duration::from_secs(60);
        let mut download = Download::new(fetch, deadline, FetchOptions::default());
        download.complete_since = Some(begun);
        assert_eq!(download.next_look(begun), begun + AGREEMENT);
        for later in [AGREEMENT, 2 * AGREEMENT] {
            assert_eq!(download.next_look(begun + later), deadline);
        }
    }
}
