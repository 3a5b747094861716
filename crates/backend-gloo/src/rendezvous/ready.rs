//! Being ready: a rank that is connected with everybody says so to all, and hears it from all; or one gives up, and says why.

use std::io::IoSlice;

use ftcore::{Error, ErrorKind, Result};
use rustix::net::RecvFlags;

use super::Rendezvous;
use crate::transport::tcp::Moved;
use crate::wire::{self, Control, ControlKind};

impl Rendezvous<'_> {
    /// Once connected with everybody, tells everybody.
    pub(super) fn say_ready(&mut self) -> Result<()> {
        if self.said_ready || !self.missing().is_empty() {
            return Ok(());
        }
        self.said_ready = true;
        let near = self.shares_memory_with_all();
        let header = Control {
            kind: ControlKind::Ready,
            code: self.core,
            epoch: self.configuration.epoch.0,
            id: u64::from(self.lowest_neighbour()),
            a: u32::from(near),
            b: self.configuration.rank,
            length: 0,
        }
        .encode();
        let mut lost = None;
        for (found, rank) in self.found.iter_mut().zip(0u32..) {
            let Some(link) = &mut found.control else { continue };
            // A fresh connection takes these few bytes at once.
            if link.write(&[IoSlice::new(&header)]) != Moved::Bytes(Control::BYTES) {
                lost = Some((rank, found.address.clone()));
            }
        }
        match lost {
            None => Ok(()),
            Some((rank, address)) => Err(self.gone(rank, address)),
        }
    }

    fn gone(&self, rank: u32, address: String) -> Error {
        let text = "closed its connections while the others were still connecting";
        self.named(
            Error::new(ErrorKind::PeerLost, text)
                .with_peer(rank)
                .with_peer_address(address),
        )
    }

    /// A rank that is connected says that it is ready, or gives up: its abort says why.
    pub(super) fn look_at_found(&mut self) -> Result<()> {
        for rank in 0..self.configuration.world_size {
            let Some(found) = self.found.get_mut(rank as usize).filter(|f| !f.ready) else {
                continue;
            };
            let Some(link) = found.control.as_mut() else {
                continue;
            };
            let mut seen = [0u8; Control::BYTES + wire::MAX_TEXT];
            // Only looked at: what comes after the first frame belongs to the engine.
            let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
            let length = match rustix::net::recv(&*link, &mut seen[..], flags) {
                Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => continue,
                Ok((n, _)) if n > 0 => n,
                Ok(_) | Err(_) => {
                    let address = found.address.clone();
                    return Err(self.gone(rank, address));
                }
            };
            let seen = seen.get(..length).unwrap_or(&[]);
            let Some((header, rest)) = seen.split_first_chunk::<{ Control::BYTES }>() else {
                continue; // the rest of the header is on its way
            };
            let epoch = self.configuration.epoch.0;
            match Control::decode(header).filter(|h| h.epoch == epoch) {
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
                    (found.near, found.lowest, found.core) = (h.a == 1, lowest, h.code);
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

    /// Tells the ranks that are connected already.
    pub(super) fn give_up(&mut self, error: &Error) {
        let text = error.to_string();
        let text = wire::cut(&text).as_bytes();
        let header = Control {
            kind: ControlKind::Abort,
            code: wire::code_of(error.kind()),
            epoch: self.configuration.epoch.0,
            id: 0,
            a: error.context().peer.unwrap_or(u32::MAX),
            b: self.configuration.rank,
            length: text.len() as u64,
        }
        .encode();
        for found in &mut self.found {
            if let Some(link) = &mut found.control {
                // A fresh connection takes this much at once; if it does not, its end still shows.
                let _ = link.write(&[IoSlice::new(&header), IoSlice::new(text)]);
            }
        }
    }
}
