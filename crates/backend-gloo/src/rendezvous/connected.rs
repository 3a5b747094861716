//! What a rank has once it is connected with all others, made of the connections that were found.

use ftcore::{Error, ErrorKind, Result};

use super::{Common, Rendezvous};
use crate::channels::Channel;
use crate::peer::{ControlLink, ControlNotices, Peer, Way};
use crate::port::{Memory, Port, Wire};
use crate::rail::Rail;
use crate::schedule::Hosts;
use crate::transport::lines::{self, Hold};
use crate::transport::shm::Bells;

/// What a rank has once it is connected.
pub(crate) struct Connected {
    /// By rank; `None` at the own one.
    pub(crate) peers: Vec<Option<Peer>>,
    /// Likewise.
    pub(crate) ports: Vec<Option<Port>>,
    /// The ways of messages, likewise.
    pub(crate) channels: Vec<Option<Channel>>,
    pub(crate) bells: Bells,
    /// All ranks share memory with all others. The same on every rank.
    pub(crate) one_host: bool,
    /// Which ranks share memory, and how much each owns of large sums. The same on every rank.
    pub(crate) hosts: Hosts,
    /// Each rank of this host is bound to a core of its own, and so is this one.
    pub(crate) apart: bool,
}

impl Rendezvous<'_> {
    /// Which ranks share memory, once all ranks are ready.
    pub(super) fn hosts(&self) -> Hosts {
        let own = self.configuration.rank;
        let lowest: Vec<u32> = self
            .found
            .iter()
            .zip(0u32..)
            .map(|(found, rank)| match rank == own {
                true => self.lowest_neighbour(),
                false => found.lowest,
            })
            .collect();
        Hosts::new(&lowest)
    }

    pub(super) fn into_connected(self, hosts: Hosts) -> Result<Connected> {
        let own = self.configuration.rank;
        let one_host = self.shares_memory_with_all() && {
            let others = self
                .found
                .iter()
                .enumerate()
                .filter(|(rank, _)| *rank != own as usize);
            others.into_iter().all(|(_, found)| found.one_host)
        };
        let mut neighbours = self.found.iter().filter(|found| found.memory.is_some());
        let apart = self.core != 0 && neighbours.all(|found| ![0, self.core].contains(&found.core));
        let bells = match &self.local {
            Some((_, region)) => region.bells(!one_host)?,
            None => Bells::private(true)?,
        };
        let (mut peers, mut ports, mut channels) = (Vec::new(), Vec::new(), Vec::new());
        for (found, rank) in self.found.into_iter().zip(0u32..) {
            if rank == own {
                peers.push(None);
                ports.push(None);
                channels.push(None);
                continue;
            }
            let address = found.address.clone();
            let half = || Error::new(ErrorKind::Internal, "a rank lacks one of its connections");
            let mut notices = None;
            let wire = match (found.data, found.messages, found.memory) {
                (_, _, Some(mut shared)) => {
                    if one_host {
                        shared.close_descriptors();
                        notices = Some(shared.notices);
                    }
                    let counters = self.counters.clone();
                    channels.push(Some(Channel::local(rank, address, shared.messages, counters)));
                    Wire::Memory(Memory::new(
                        shared.collectives,
                        shared.tensors,
                        self.counters.clone(),
                    ))
                }
                (Some(mut data), Some(messages), None) => {
                    channels.push(Some(Channel::remote(rank, address, messages)));
                    data.readable = true;
                    data.writable = true;
                    Wire::Socket(data)
                }
                _ => return Err(half()),
            };
            let mut control = found.control.ok_or_else(half)?;
            let way = match notices {
                Some(notices) => {
                    let line = match found.line {
                        Common::Needless => None,
                        Common::Known(line) => Some(line),
                        Common::New { process, id } => {
                            let socket = control.into_socket().ok_or_else(half)?;
                            Some(lines::open(process, id, socket)?)
                        }
                    };
                    Way::Memory(ControlNotices::new(notices, line.map(Hold::new)))
                }
                None => {
                    // Whatever arrived before the engine looks must be seen.
                    control.readable = true;
                    control.writable = true;
                    Way::Connection(Box::new(ControlLink::new(control)))
                }
            };
            let mut port = Port::new(rank, found.address.clone(), wire);
            if matches!(port.wire, Wire::Socket(_)) {
                port.rails = found.rails.into_iter().flatten().map(Rail::new).collect();
            }
            ports.push(Some(port));
            peers.push(Some(Peer {
                rank,
                address: found.address,
                control: way,
                left: None,
                gone: None,
                words: None,
            }));
        }
        Ok(Connected {
            peers,
            ports,
            channels,
            bells,
            one_host,
            hosts,
            apart,
        })
    }
}
