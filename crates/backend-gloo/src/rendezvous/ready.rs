//! Being ready: a rank that is connected with all ranks says so to all, and hears it from all; or one gives up, and says why.

use std::io::IoSlice;

use ftcore::{Error, ErrorKind, Result};

use super::Rendezvous;
use super::outgoing::Dial;
use crate::transport::tcp::Moved;
use crate::wire::{self, Control, ControlKind, Hello, Purpose};

/// The id of an abort by a rank that gives up its configuration: one that was connected before it failed has another.
const GAVE_UP: u64 = 1;

impl Rendezvous<'_> {
    /// Once connected with all ranks, tells all ranks.
    pub(super) fn say_ready(&mut self) -> Result<()> {
        if self.said_ready || !self.missing().is_empty() {
            return Ok(());
        }
        self.said_ready = true;
        let one_host = self.shares_memory_with_all();
        let header = Control {
            kind: ControlKind::Ready,
            code: self.core,
            epoch: self.configuration.epoch,
            id: u64::from(self.lowest_neighbour()),
            a: u32::from(one_host),
            b: self.configuration.rank,
            length: 0,
        }
        .encode();
        let mut lost = None;
        for (found, rank) in self.found.iter_mut().zip(0u32..) {
            if let Some(memory) = &mut found.memory {
                // From now on it may be connected, and listen there.
                memory.notices.writer.arm();
            }
            let Some(link) = &mut found.control else { continue };
            // A fresh connection takes these few bytes at once.
            if link.write(&[IoSlice::new(&header)]) != Moved::Bytes(Control::BYTES) {
                lost = Some((rank, found.address.clone()));
            }
        }
        match lost {
            None => Ok(()),
            Some((rank, address)) => {
                // It may have said why, or have been ready before: then the rest of its words is the engine's.
                self.look_at_found()?;
                match self.found.get(rank as usize) {
                    Some(found) if found.ready => Ok(()),
                    _ => Err(self.gone(rank, address)),
                }
            }
        }
    }

    pub(super) fn gone(&self, rank: u32, address: String) -> Error {
        let text = "closed its connections while the others were still connecting";
        self.named(
            Error::new(ErrorKind::PeerLost, text)
                .with_peer(rank)
                .with_peer_address(address),
        )
    }

    /// A rank that is connected says that it is ready, or gives up: its abort says why. It may also give up when it has been ready, because
    /// another one was not: no rank needs to wait for that one then (L27).
    pub(super) fn look_at_found(&mut self) -> Result<()> {
        for rank in 0..self.configuration.world_size {
            let Some(found) = self.found.get_mut(rank as usize) else {
                continue;
            };
            let Some(link) = found.control.as_mut() else {
                continue;
            };
            let mut seen = [0u8; Control::BYTES + wire::MAX_TEXT];
            // Only looked at: what comes after the first frame belongs to the engine.
            let length = match link.peek(&mut seen) {
                Moved::Nothing => continue,
                Moved::Bytes(n) => n,
                // It may have been connected with all: that is the engine's to find.
                Moved::Closed if found.ready => continue,
                Moved::Closed => {
                    let address = found.address.clone();
                    return Err(match link.authentic() {
                        Ok(()) => self.gone(rank, address),
                        Err(forged) => self.named(forged.with_peer(rank).with_peer_address(address)),
                    });
                }
            };
            let seen = seen.get(..length).unwrap_or(&[]);
            let Some((header, rest)) = seen.split_first_chunk::<{ Control::BYTES }>() else {
                continue; // the rest of the header is on its way
            };
            let epoch = self.configuration.epoch;
            let header = Control::decode(header).filter(|h| h.epoch == epoch);
            let gave_up = |h: &Control| h.kind == ControlKind::Abort && h.id == GAVE_UP;
            if found.ready && !header.as_ref().is_some_and(gave_up) {
                continue; // Likewise.
            }
            match header {
                Some(h) if h.kind == ControlKind::Ready => {
                    let mut taken = [0u8; Control::BYTES];
                    let lowest = u32::try_from(h.id).ok().filter(|lowest| *lowest <= rank);
                    let Some(lowest) = lowest else {
                        let text = format!("says that it shares memory with rank {} at the lowest", h.id);
                        let error = Error::new(ErrorKind::Protocol, text)
                            .with_peer(rank)
                            .with_peer_address(found.address.clone());
                        return Err(self.named(error));
                    };
                    (found.one_host, found.lowest, found.core) = (h.a == 1, lowest, h.code);
                    found.ready = link.read(&mut taken) == Moved::Bytes(Control::BYTES);
                }
                Some(h) if h.kind == ControlKind::Abort => {
                    let Some(text) = usize::try_from(h.length).ok().and_then(|n| rest.get(..n)) else {
                        continue; // the rest of the text is on its way
                    };
                    let text = format!("rank {} reports: {}", h.b, String::from_utf8_lossy(text));
                    let named = h.a != u32::MAX && h.a != self.configuration.rank;
                    let blamed = if named { h.a } else { h.b };
                    let error = Error::new(wire::kind_of(h.code), text).with_peer(blamed);
                    return Err(self.named(error));
                }
                _ => {
                    let text = "sent something else than that it is ready";
                    let error = Error::new(ErrorKind::Protocol, text)
                        .with_peer(rank)
                        .with_peer_address(found.address.clone());
                    return Err(self.named(error));
                }
            }
        }
        Ok(())
    }

    /// Tells the ranks that are connected already, and those for which this one may be.
    pub(super) fn give_up(&mut self, error: &Error) {
        let text = error.to_string();
        let text = wire::cut(&text).as_bytes();
        let header = Control {
            kind: ControlKind::Abort,
            code: wire::code_of(error.kind()),
            epoch: self.configuration.epoch,
            id: GAVE_UP,
            a: error.context().peer.unwrap_or(u32::MAX),
            b: self.configuration.rank,
            length: text.len() as u64,
        }
        .encode();
        let greeted = self
            .dialed
            .iter_mut()
            .filter_map(|dialed| match &mut dialed.state {
                Dial::Greeting { link, sent, .. } => {
                    let speaks = matches!(dialed.purpose, Purpose::Local | Purpose::Control);
                    (speaks && *sent == Hello::BYTES).then_some(link)
                }
                _ => None,
            });
        let said = [header.as_slice(), text].concat();
        // A rank that is connected with all listens in memory, and may have closed the connection.
        for memory in self.found.iter_mut().filter_map(|found| found.memory.as_mut()) {
            memory.notices.writer.say(&said);
        }
        let found = self.found.iter_mut().filter_map(|found| found.control.as_mut());
        for link in found.chain(greeted) {
            // A fresh connection takes this much at once; if it does not, its end still shows.
            let _ = link.write(&[IoSlice::new(&header), IoSlice::new(text)]);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;
    use std::sync::Arc;
    use std::time::Duration;

    use ftcore::{Configuration, Epoch, GroupOptions, InMemoryStore, deadline_in};

    use super::*;
    use crate::options::Settings;
    use crate::rendezvous::outgoing::greeting;
    use crate::transport::tcp::{Counters, Link};

    /// Rank `rank` of two, and the other end of a connection to the other one.
    fn with_pair(rank: u32, body: impl FnOnce(Rendezvous<'_>, Link, UnixStream)) {
        let configuration = Configuration {
            store: Arc::new(InMemoryStore::new()),
            prefix: "ready".into(),
            name: "ready".into(),
            epoch: Epoch(1),
            rank,
            world_size: 2,
            deadline: deadline_in(Duration::from_secs(20)),
            cancel: Default::default(),
        };
        let mut options = GroupOptions::default();
        options.hints.insert("transport".into(), "tcp".into());
        let settings = Settings::new(options).unwrap();
        let counters = Arc::new(Counters::default());
        let rendezvous = Rendezvous::new(&configuration, &settings, counters.clone()).unwrap();
        let (ours, theirs) = UnixStream::pair().unwrap();
        body(rendezvous, Link::local(ours, counters).unwrap(), theirs);
    }

    fn control(kind: ControlKind, text: &str) -> Vec<u8> {
        numbered(kind, 0, text)
    }

    fn numbered(kind: ControlKind, id: u64, text: &str) -> Vec<u8> {
        let header = Control {
            kind,
            code: wire::code_of(ErrorKind::Timeout),
            epoch: Epoch(1),
            id,
            a: u32::MAX,
            b: 1,
            length: text.len() as u64,
        };
        [&header.encode(), text.as_bytes()].concat()
    }

    /// What rank 0 makes of it that rank 1 says this and goes before rank 0 can say that it is ready.
    fn after(says: &[Vec<u8>]) -> Result<()> {
        let mut outcome = Ok(());
        with_pair(0, |mut rendezvous, link, mut theirs| {
            for frame in says {
                theirs.write_all(frame).unwrap();
            }
            drop(theirs);
            let (spare, _) = UnixStream::pair().unwrap();
            let data = |stream: &UnixStream| {
                Link::local(stream.try_clone().unwrap(), rendezvous.counters.clone()).unwrap()
            };
            let (data, messages) = (data(&spare), data(&spare));
            let found = &mut rendezvous.found[1];
            (found.control, found.data, found.messages) = (Some(link), Some(data), Some(messages));
            // In the order of `run`.
            outcome = rendezvous.say_ready().and_then(|()| rendezvous.look_at_found());
        });
        outcome
    }

    #[test]
    fn a_rank_that_gave_up_before_this_one_was_ready_is_heard_and_not_only_missed() {
        let error = after(&[control(ControlKind::Abort, "waiting for rank 7")]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
        assert!(
            error.to_string().contains("rank 1 reports: waiting for rank 7"),
            "{error}"
        );
        let error = after(&[]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::PeerLost, "{error}");
        // What it said after it was ready is read once the group stands.
        after(&[
            control(ControlKind::Ready, ""),
            control(ControlKind::Abort, "gave up later"),
        ])
        .unwrap();
    }

    #[test]
    fn l27_a_rank_that_gives_up_after_it_was_ready_is_heard_by_those_that_wait_for_others() {
        let ready = || control(ControlKind::Ready, "");
        let gives_up = numbered(ControlKind::Abort, GAVE_UP, "waiting for rank 7");
        // Before this rank is ready, and after.
        let error = after(&[ready(), gives_up.clone()]).unwrap_err();
        assert!(error.to_string().contains("waiting for rank 7"), "{error}");
        with_pair(0, |mut rendezvous, link, mut theirs| {
            rendezvous.found[1].control = Some(link);
            theirs.write_all(&ready()).unwrap();
            rendezvous.look_at_found().unwrap();
            assert!(rendezvous.found[1].ready);
            rendezvous.look_at_found().unwrap();
            theirs.write_all(&gives_up).unwrap();
            let error = rendezvous.look_at_found().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
            assert!(
                error.to_string().contains("rank 1 reports: waiting for rank 7"),
                "{error}"
            );
        });
        // One that was connected with all and failed then, or is gone, is none of the configuration's affairs.
        for later in [Some(control(ControlKind::Abort, "failed")), None] {
            with_pair(0, |mut rendezvous, link, mut theirs| {
                rendezvous.found[1].control = Some(link);
                theirs.write_all(&ready()).unwrap();
                rendezvous.look_at_found().unwrap();
                later.iter().for_each(|frame| theirs.write_all(frame).unwrap());
                drop(theirs);
                rendezvous.look_at_found().unwrap();
            });
        }
    }

    #[test]
    fn a_rank_that_gives_up_while_it_is_being_recognised_says_why() {
        with_pair(1, |mut rendezvous, link, mut theirs| {
            let dialed = rendezvous
                .dialed
                .iter_mut()
                .find(|d| d.purpose == Purpose::Control);
            let mut state = greeting(link);
            if let Dial::Greeting { sent, .. } = &mut state {
                *sent = Hello::BYTES;
            }
            dialed.unwrap().state = state;
            rendezvous.give_up(&Error::timeout("waiting for rank 7"));
            drop(rendezvous);
            let mut said = Vec::new();
            theirs.read_to_end(&mut said).unwrap();
            let (header, text) = said.split_first_chunk().unwrap();
            let header = Control::decode(header).unwrap();
            assert_eq!((header.kind, header.id), (ControlKind::Abort, GAVE_UP));
            assert!(String::from_utf8_lossy(text).contains("waiting for rank 7"));
        });
    }
}
