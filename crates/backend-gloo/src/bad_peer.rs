//! Tests against a rank 1 that knows the greeting and then breaks every rule (INV-10): rank 0 gets a typed error that
//! names it, at once, and works again at the next epoch.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use ftcore::{
    Configuration, DType, Epoch, Error, ErrorKind, Fingerprint, GroupOptions, InMemoryStore, ProcessGroup,
    ProcessGroupExt, ReduceOp, Result, Store, SubmitOptions, Tensor, deadline_in,
};

use crate::GlooGroup;
use crate::schedule::Algorithm;
use crate::wire::{Control, ControlKind, DataHeader, EAGER, Hello, Purpose, SEGMENT, VERSION};

pub(crate) fn soon() -> Instant {
    deadline_in(Duration::from_secs(20))
}

pub(crate) fn configuration(store: &Arc<dyn Store>, epoch: u64, rank: u32, world_size: u32) -> Configuration {
    Configuration {
        store: store.clone(),
        prefix: "bad".into(),
        name: "bad".into(),
        epoch: Epoch(epoch),
        rank,
        world_size,
        deadline: soon(),
        cancel: Default::default(),
    }
}

/// The connections of a rank that is not one of ours.
pub(crate) struct Stranger {
    pub(crate) data: TcpStream,
    pub(crate) control: TcpStream,
    pub(crate) messages: TcpStream,
}

/// Ranks made by hand live in a process of their own.
const NEIGHBOURS_PROCESS: u64 = 77;

pub(crate) fn hello(purpose: Purpose, nonce: u64) -> Hello {
    Hello {
        version: VERSION,
        purpose,
        rank: 1,
        world: 2,
        connections: 1,
        links: 0,
        epoch: Epoch(1),
        constants: crate::options::constants(),
        nonce,
        process: NEIGHBOURS_PROCESS,
        line: 0,
    }
}

pub(crate) fn frame(kind: ControlKind, id: u64, length: u64) -> Control {
    Control {
        kind,
        code: DType::U8.code(),
        epoch: Epoch(1),
        id,
        a: 0,
        b: 1,
        length,
    }
}

/// What rank 0 has published of itself.
pub(crate) struct Published {
    pub(crate) nonce: u64,
    port: u16,
    /// The abstract name of its socket for ranks of its host.
    local: String,
}

impl Published {
    pub(crate) fn of_rank_0(store: &Arc<dyn Store>) -> Self {
        let card = String::from_utf8(store.get("bad/1/gloo/0", soon()).unwrap()).unwrap();
        let fields: Vec<&str> = card.split(' ').collect();
        Self {
            nonce: u64::from_str_radix(fields[1], 16).unwrap(),
            port: fields[3].parse::<SocketAddr>().unwrap().port(),
            local: fields[5].to_owned(),
        }
    }

    pub(crate) fn dial(&self) -> TcpStream {
        let stream = TcpStream::connect(("127.0.0.1", self.port)).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        stream
    }

    /// A connection over which `greeting` was answered by rank 0.
    pub(crate) fn greet(&self, greeting: &Hello) -> TcpStream {
        let mut stream = self.dial();
        stream.write_all(&greeting.encode()).unwrap();
        let mut answer = [0; Hello::BYTES];
        stream.read_exact(&mut answer).unwrap();
        assert_eq!(Hello::decode(&answer).unwrap().rank, 0);
        stream
    }
}

impl Stranger {
    /// As rank 1 of 2.
    fn connect(store: &Arc<dyn Store>) -> Self {
        Self::connect_as(store, 1, 2)
    }

    /// With rank 0 only: no other rank listens.
    pub(crate) fn connect_as(store: &Arc<dyn Store>, rank: u32, world: u32) -> Self {
        Self::connect_saying(store, rank, world, 0)
    }

    /// And says that it shares memory with rank `lowest` at the lowest.
    fn connect_saying(store: &Arc<dyn Store>, rank: u32, world: u32, lowest: u64) -> Self {
        let published = Published::of_rank_0(store);
        let open = |purpose| {
            published.greet(&Hello {
                rank,
                world,
                ..hello(purpose, published.nonce)
            })
        };
        let data = open(Purpose::Data);
        let messages = open(Purpose::Messages);
        let mut control = open(Purpose::Control);
        control
            .write_all(&frame(ControlKind::Ready, lowest, 0).encode())
            .unwrap();
        Self {
            data,
            control,
            messages,
        }
    }
}

#[test]
fn a_rank_that_shares_memory_with_one_above_it_at_the_lowest_is_refused_by_name() {
    // Itself is the highest that can be true; the hosts of all ranks are made of these numbers.
    for (lowest, fits) in [(0, true), (1, true), (2, false), (u64::from(u32::MAX) + 1, false)] {
        let store: Arc<dyn Store> = Arc::new(InMemoryStore::new());
        let group = GlooGroup::new("bad", GroupOptions::default()).unwrap();
        std::thread::scope(|scope| {
            let ours = scope.spawn(|| group.configure(configuration(&store, 1, 0, 2)));
            let stranger = Stranger::connect_saying(&store, 1, 2, lowest);
            let connected = ours.join().unwrap();
            assert_eq!(connected.is_ok(), fits, "{lowest}: {connected:?}");
            if let Err(error) = connected {
                assert_eq!(error.kind(), ErrorKind::Protocol, "{error}");
                assert_eq!(error.context().peer, Some(1), "{error}");
            }
            drop(stranger);
        });
    }
}

/// What rank 0's group says after `misbehave`; a collective and a receive are pending on it.
fn after(misbehave: impl FnOnce(&mut Stranger)) -> Error {
    let store: Arc<dyn Store> = Arc::new(InMemoryStore::new());
    let group = GlooGroup::new("bad", GroupOptions::default()).unwrap();
    std::thread::scope(|scope| {
        let ours = scope.spawn(|| group.configure(configuration(&store, 1, 0, 2)).unwrap());
        let mut stranger = Stranger::connect(&store);
        ours.join().unwrap();
        let work = group
            .all_reduce(Tensor::zeros(DType::F32, 1000), ReduceOp::Sum)
            .unwrap();
        let receive = group.recv(Tensor::zeros(DType::F32, 1000), 1, 3).unwrap();
        misbehave(&mut stranger);
        let e = work.wait(soon()).unwrap_err();
        assert!(receive.wait(soon()).is_err());
        assert_eq!(work.recover().len() + receive.recover().len(), 2);
        assert_eq!(group.error().unwrap().kind(), e.kind());
        group.configure(configuration(&store, 2, 0, 1)).unwrap();
        group.barrier().unwrap();
        e
    })
}

pub(crate) fn data_header(seq: u64, length: u64) -> DataHeader {
    let tensors = vec![Tensor::zeros(DType::F32, 1000)];
    let op = ftcore::Collective::AllReduce {
        tensors,
        op: ReduceOp::Sum,
    };
    DataHeader {
        epoch: Epoch(1),
        seq,
        round: 0,
        algorithm: 8,
        contributors: 1,
        length,
        fingerprint: op.fingerprint(),
        lent: false,
    }
}

#[test]
fn a_peer_that_sends_a_little_now_and_then_keeps_no_operation_from_its_deadline() {
    const COUNT: usize = 4 << 20;
    let store: Arc<dyn Store> = Arc::new(InMemoryStore::new());
    let group = GlooGroup::new("bad", GroupOptions::default()).unwrap();
    let sum = || ftcore::Collective::AllReduce {
        tensors: vec![Tensor::zeros(DType::F32, COUNT)],
        op: ReduceOp::Sum,
    };
    std::thread::scope(|scope| {
        let ours = scope.spawn(|| group.configure(configuration(&store, 1, 0, 2)).unwrap());
        let mut stranger = Stranger::connect(&store);
        ours.join().unwrap();
        let options = SubmitOptions::by(deadline_in(Duration::from_secs(1)));
        let (tell, told) = mpsc::channel();
        let group = &group;
        scope.spawn(move || tell.send(group.run_blocking(sum(), options)));
        let header = DataHeader {
            fingerprint: sum().fingerprint(),
            ..data_header(0, 4 * COUNT as u64)
        };
        stranger.data.write_all(&header.encode()).unwrap();
        // Byte by byte: the tensor takes longer than this test may. The group closes its connections before the call
        // returns, so the writes end first.
        let until = soon();
        scope.spawn(move || while Instant::now() < until && stranger.data.write_all(&[0]).is_ok() {});
        let told = told.recv_timeout(Duration::from_secs(15));
        let failed = told.expect("it goes on beyond its deadline").unwrap_err();
        let error = failed.error;
        assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
    });
}

#[test]
fn garbage_on_any_connection_is_a_protocol_error_that_names_the_rank() {
    let streams: [fn(&mut Stranger) -> &mut TcpStream; 3] =
        [|s| &mut s.data, |s| &mut s.control, |s| &mut s.messages];
    for stream in streams {
        let e = after(|s| stream(s).write_all(&[0xAB; 300]).unwrap());
        assert_eq!(e.kind(), ErrorKind::Protocol, "{e}");
        assert_eq!(e.context().peer, Some(1), "{e}");
    }
}

#[test]
fn frames_that_break_the_rules_end_the_group_without_allocating_what_they_claim() {
    type Break = (&'static str, fn(&mut Stranger), ErrorKind);
    let ways: [Break; 14] = [
        (
            "bytes of a message that was not accepted",
            |s| {
                s.messages
                    .write_all(&frame(ControlKind::Data, 5, 100).encode())
                    .unwrap()
            },
            ErrorKind::Protocol,
        ),
        (
            "a piece larger than pieces are",
            |s| {
                let f = frame(ControlKind::Data, 5, SEGMENT as u64 + 1);
                s.messages.write_all(&f.encode()).unwrap();
            },
            ErrorKind::Protocol,
        ),
        (
            "an endless text",
            |s| {
                let f = frame(ControlKind::Abort, 0, u64::MAX);
                s.control.write_all(&f.encode()).unwrap();
            },
            ErrorKind::Protocol,
        ),
        (
            "an accept of what was not offered",
            |s| {
                s.messages
                    .write_all(&frame(ControlKind::Accept, 9, 0).encode())
                    .unwrap()
            },
            ErrorKind::Protocol,
        ),
        (
            "another epoch on the control connection",
            |s| {
                let f = Control {
                    epoch: Epoch(7),
                    ..frame(ControlKind::Leave, 0, 0)
                };
                s.control.write_all(&f.encode()).unwrap();
            },
            ErrorKind::Protocol,
        ),
        (
            "another epoch on the connection for messages",
            |s| {
                let f = Control {
                    epoch: Epoch(7),
                    ..frame(ControlKind::Offer, 0, 1)
                };
                s.messages.write_all(&f.encode()).unwrap();
            },
            ErrorKind::Protocol,
        ),
        (
            "a message on the control connection",
            |s| {
                let f = frame(ControlKind::Offer, 0, 1).encode();
                s.control.write_all(&f).unwrap();
            },
            ErrorKind::Protocol,
        ),
        (
            "a leave on the connection for messages",
            |s| {
                let f = frame(ControlKind::Leave, 0, 0).encode();
                s.messages.write_all(&f).unwrap();
            },
            ErrorKind::Protocol,
        ),
        (
            "more bytes than go with an offer, in large elements",
            |s| {
                let f = Control {
                    code: DType::F64.code(),
                    ..frame(ControlKind::Inline, 0, EAGER as u64)
                };
                s.messages.write_all(&f.encode()).unwrap();
            },
            ErrorKind::Protocol,
        ),
        (
            "a message of another length than its receive",
            |s| {
                let f = Control {
                    code: DType::F32.code(),
                    a: 3,
                    ..frame(ControlKind::Inline, 0, 999)
                };
                s.messages.write_all(&f.encode()).unwrap();
            },
            ErrorKind::Mismatch,
        ),
        (
            "more offers than a rank may have open",
            |s| {
                let f = frame(ControlKind::Offer, 0, 1).encode();
                // The group may end before the last one is written.
                let _ = s.messages.write_all(&f.repeat(20_000));
            },
            ErrorKind::Protocol,
        ),
        (
            "another epoch in a collective",
            |s| {
                let h = DataHeader {
                    epoch: Epoch(0),
                    ..data_header(0, 4000)
                };
                s.data.write_all(&h.encode()).unwrap();
            },
            ErrorKind::Protocol,
        ),
        (
            "a payload of an impossible length",
            |s| s.data.write_all(&data_header(0, u64::MAX).encode()).unwrap(),
            ErrorKind::Mismatch,
        ),
        (
            "more contributors than ranks",
            |s| {
                let h = DataHeader {
                    contributors: 1000,
                    ..data_header(0, 4000)
                };
                s.data.write_all(&h.encode()).unwrap();
            },
            ErrorKind::Protocol,
        ),
    ];
    for (what, misbehave, kind) in ways {
        let e = after(misbehave);
        assert_eq!(e.kind(), kind, "{what}: {e}");
    }
}

#[test]
fn an_unknown_fingerprint_is_a_mismatch_that_shows_both_sides() {
    let e = after(|s| {
        let h = DataHeader {
            fingerprint: Fingerprint::decode(&[0xEE; 24]),
            ..data_header(0, 4000)
        };
        s.data.write_all(&h.encode()).unwrap();
    });
    assert_eq!(e.kind(), ErrorKind::Mismatch, "{e}");
    let text = e.to_string();
    assert!(
        text.contains("operation 238") && text.contains("all_reduce(f32, 1000 elements, sum)"),
        "{text}"
    );
}

#[test]
fn a_rank_that_vanishes_without_a_word_is_lost_by_name() {
    let e = after(|s| {
        s.control.shutdown(std::net::Shutdown::Both).unwrap();
        s.data.shutdown(std::net::Shutdown::Both).unwrap();
    });
    assert_eq!(e.kind(), ErrorKind::PeerLost, "{e}");
    assert_eq!(e.context().peer, Some(1), "{e}");
    assert!(e.context().peer_address.is_some(), "{e}");
}

#[test]
fn ranks_of_different_builds_fail_on_both_sides() {
    let store: Arc<dyn Store> = Arc::new(InMemoryStore::new());
    std::thread::scope(|scope| {
        for rank in 0..2 {
            let store = &store;
            scope.spawn(move || {
                let group = if rank == 0 {
                    GlooGroup::new("ours", GroupOptions::default()).unwrap()
                } else {
                    GlooGroup::of_another_build("theirs").unwrap()
                };
                let e = group.configure(configuration(store, 1, rank, 2)).unwrap_err();
                assert_eq!(e.kind(), ErrorKind::Mismatch, "{e}");
                assert!(e.to_string().contains("different algorithm constants"), "{e}");
            });
        }
    });
}

#[test]
fn the_registry_knows_gloo_for_the_cpu() {
    let registry = ftcore::Registry::global();
    registry.is_backend_available("GLOO", None).unwrap();
    let group = registry
        .create("gloo", &ftcore::Device::CPU, &GroupOptions::default())
        .unwrap();
    assert_eq!(&*group.info().backend, "gloo");
    let options = GroupOptions {
        max_ctas: Some(1),
        ..Default::default()
    };
    let e = registry
        .create("gloo", &ftcore::Device::CPU, &options)
        .map(drop)
        .unwrap_err();
    assert!(e.to_string().contains("max_ctas"), "{e}");
}

/// A rank 1 that shares memory and is not one of ours.
pub(crate) struct Neighbour {
    shared: crate::transport::shm::Rings<{ crate::transport::shm::COLLECTIVES }>,
    pub(crate) channels: crate::transport::shm::Rings<{ crate::transport::shm::MESSAGES }>,
    tensors: crate::transport::shm::Neighbour,
    notices: crate::transport::shm::Notices,
    control: std::os::unix::net::UnixStream,
    _region: crate::transport::shm::Region,
}

impl Neighbour {
    pub(crate) fn connect(store: &Arc<dyn Store>) -> Self {
        use std::os::linux::net::SocketAddrExt;
        let Published { nonce, local, .. } = Published::of_rank_0(store);
        let address = std::os::unix::net::SocketAddr::from_abstract_name(local).unwrap();
        let mut control = std::os::unix::net::UnixStream::connect_addr(&address).unwrap();
        let region = crate::transport::shm::Region::new(2).unwrap();
        let hello = hello(Purpose::Local, nonce).encode();
        crate::transport::shm::send(&control, &hello, &region.handles()).unwrap();
        let (mut answer, mut handles) = ([0; Hello::BYTES], Vec::new());
        let until = soon();
        while let Err(e) = crate::transport::shm::receive(&control, &mut answer, &mut handles) {
            assert!(e == rustix::io::Errno::AGAIN && Instant::now() < until, "{e}");
            std::thread::yield_now();
        }
        assert_eq!(Hello::decode(&answer).unwrap().rank, 0);
        let shared = region.open(1, 0, 1, handles).unwrap();
        let ready = Control {
            a: 1,
            ..frame(ControlKind::Ready, 0, 0)
        };
        control.write_all(&ready.encode()).unwrap();
        Self {
            shared: shared.collectives,
            channels: shared.messages,
            tensors: shared.tensors,
            notices: shared.notices,
            control,
            _region: region,
        }
    }

    /// Leaves and closes.
    pub(crate) fn leave(&mut self) {
        let leave = frame(ControlKind::Leave, 0, 0).encode();
        self.notices.writer.say(&leave);
        self.control.shutdown(std::net::Shutdown::Both).unwrap();
    }

    fn write(&mut self, bytes: &[u8]) {
        self.shared.writer.put(bytes);
        self.shared.writer.publish();
        self.shared.bell.ring();
    }

    /// Offers to read in place.
    fn offer(&mut self) {
        self.write(&lent_header(Algorithm::Exchange as u32, 0, 0).encode());
    }

    /// Says where its half of the swap of [`LENT`] lies in `round`.
    fn lend(&mut self, round: u32, place: u64) {
        let header = lent_header(Algorithm::Cross as u32, round, LENT as u64 * 2);
        self.shared.writer.put(&header.encode());
        self.shared.writer.put(&place.to_le_bytes());
        self.shared.writer.pad();
        self.write(&[]);
    }

    /// Waits until rank 0 has read all that was lent.
    fn take_back(&mut self) {
        let (until, all) = (soon(), self.shared.writer.position());
        while !self.shared.writer.is_back(all).unwrap() {
            assert!(Instant::now() < until, "rank 0 reads nothing");
            std::thread::yield_now();
        }
    }

    /// Gives `bytes` of rank 0's frames back.
    fn give_back(&mut self, bytes: usize) {
        let until = soon();
        while self.shared.reader.available(bytes).unwrap() < bytes {
            assert!(Instant::now() < until, "rank 0 sends nothing");
            std::thread::yield_now();
        }
        self.shared.reader.take(bytes);
        self.shared.reader.release();
        self.shared.bell.ring();
    }
}

/// Elements of f32 that two ranks would swap in place.
const LENT: usize = 64 * 1024;

fn lent_header(algorithm: u32, round: u32, length: u64) -> DataHeader {
    let tensors = vec![Tensor::zeros(DType::F32, LENT)];
    let op = ReduceOp::Sum;
    DataHeader {
        round,
        algorithm,
        length,
        fingerprint: ftcore::Collective::AllReduce { tensors, op }.fingerprint(),
        lent: true,
        ..data_header(0, 0)
    }
}

/// What rank 0 says after `misbehave` in shared memory, in a blocking call or in submitted work.
fn after_neighbour(blocking: bool, misbehave: impl FnOnce(&mut Neighbour)) -> Error {
    swapped_with_neighbour(blocking, Tensor::zeros(DType::F32, 1000), misbehave).unwrap_err()
}

/// What comes of an all-reduce of `tensor`.
fn swapped_with_neighbour(
    blocking: bool,
    tensor: Tensor,
    misbehave: impl FnOnce(&mut Neighbour),
) -> Result<Tensor> {
    let store: Arc<dyn Store> = Arc::new(InMemoryStore::new());
    let group = GlooGroup::new("bad", GroupOptions::default()).unwrap();
    std::thread::scope(|scope| {
        let ours = scope.spawn(|| group.configure(configuration(&store, 1, 0, 2)).unwrap());
        let mut neighbour = Neighbour::connect(&store);
        ours.join().unwrap();
        assert_eq!(group.transport(), "shm");
        let e = if blocking {
            let tensors = vec![tensor];
            let op = ftcore::Collective::AllReduce {
                tensors,
                op: ReduceOp::Sum,
            };
            let group = &group;
            let call = scope.spawn(move || group.run_blocking(op, Default::default()));
            misbehave(&mut neighbour);
            let failed = match call.join().unwrap() {
                Ok(mut completion) => return Ok(completion.tensors.remove(0)),
                Err(failed) => failed,
            };
            assert_eq!(failed.tensors.len(), 1);
            failed.error
        } else {
            let work = group.all_reduce(tensor, ReduceOp::Sum).unwrap();
            misbehave(&mut neighbour);
            if work.wait(soon()).is_ok() {
                return work.take_tensor();
            }
            let e = work.wait(soon()).unwrap_err();
            assert_eq!(work.recover().len(), 1);
            e
        };
        // The notices may be faster than the call.
        let first = group.error().unwrap();
        let e = if e.kind() == ErrorKind::Poisoned { first } else { e };
        group.configure(configuration(&store, 2, 0, 1)).unwrap();
        group.barrier().unwrap();
        Err(e)
    })
}

#[test]
fn memory_that_a_neighbour_took_back_while_it_was_read_is_no_result() {
    let mut theirs = crate::transport::shm::alloc(DType::F32, LENT).unwrap();
    theirs.as_mut_slice::<f32>().unwrap().fill(2.0);
    let place = crate::transport::shm::place_of(theirs.bytes()).unwrap();
    let ours = || {
        let mut tensor = crate::transport::shm::alloc(DType::F32, LENT).unwrap();
        tensor.as_mut_slice::<f32>().unwrap().fill(1.0);
        tensor
    };
    for blocking in [true, false] {
        let swap = |gives_up: bool| {
            swapped_with_neighbour(blocking, ours(), |n| {
                n.offer();
                n.lend(0, place);
                // Rank 0's offer, and where its first half lies.
                n.give_back(3 * 64);
                n.take_back();
                if gives_up {
                    drop(n.tensors.lend(0));
                }
                n.lend(1, place);
                n.give_back(2 * 64);
                if gives_up {
                    n.leave();
                }
            })
        };
        let sum = swap(false).unwrap();
        let sum = sum.as_slice::<f32>().unwrap();
        // The neighbour's half is what it says it is: it has reduced nothing.
        let (own, fetched) = sum.split_at(LENT / 2);
        assert!(own.iter().all(|x| *x == 3.0) && fetched.iter().all(|x| *x == 2.0));
        let e = swap(true).unwrap_err();
        assert_eq!(
            (e.kind(), e.context().peer),
            (ErrorKind::PeerLost, Some(1)),
            "{e}"
        );
    }
}

#[test]
fn memory_that_a_neighbour_cannot_lend_is_a_protocol_error() {
    type Break = (&'static str, fn(&mut Neighbour));
    let ways: [Break; 4] = [
        ("beyond its end", |n| {
            n.offer();
            n.lend(0, 1 << 60);
        }),
        ("a part of it beyond the end", |n| {
            n.offer();
            n.lend(0, (64 << 30) - 64);
        }),
        ("not aligned", |n| {
            n.offer();
            n.lend(0, 6);
        }),
        ("to a rank that swaps", |n| {
            n.write(&lent_header(Algorithm::Exchange as u32, 0, LENT as u64 * 4).encode());
        }),
    ];
    for blocking in [true, false] {
        for (what, misbehave) in ways {
            let ours = crate::transport::shm::alloc(DType::F32, LENT).unwrap();
            let e = swapped_with_neighbour(blocking, ours, misbehave).unwrap_err();
            assert!(
                matches!(e.kind(), ErrorKind::Protocol | ErrorKind::Mismatch),
                "{what}: {e}"
            );
            assert_eq!(e.context().peer, Some(1), "{what}: {e}");
        }
    }
}

#[test]
fn a_neighbour_that_breaks_the_rules_of_shared_memory_is_a_typed_error_that_names_it() {
    type Break = (&'static str, fn(&mut Neighbour), ErrorKind);
    let ways: [Break; 13] = [
        ("garbage", |n| n.write(&[0xAB; 300]), ErrorKind::Protocol),
        (
            "more than fits",
            |n| {
                n.shared.writer.advance(usize::MAX / 2);
                n.shared.writer.publish();
                n.shared.bell.ring();
            },
            ErrorKind::Protocol,
        ),
        (
            "read what was never written",
            |n| {
                n.shared.reader.take(1 << 40);
                n.shared.reader.release();
                // Rank 0 looks at it once it needs room.
                n.write(&data_header(0, 4000).encode()[..32]);
                n.control.shutdown(std::net::Shutdown::Both).unwrap();
            },
            ErrorKind::PeerLost,
        ),
        (
            "another epoch",
            |n| {
                let h = DataHeader {
                    epoch: Epoch(0),
                    ..data_header(0, 4000)
                };
                n.write(&h.encode());
            },
            ErrorKind::Protocol,
        ),
        (
            "another operation number",
            |n| n.write(&data_header(7, 4000).encode()),
            ErrorKind::Protocol,
        ),
        (
            "another length",
            |n| n.write(&data_header(0, u64::MAX).encode()),
            ErrorKind::Mismatch,
        ),
        (
            "more contributors than ranks",
            |n| {
                let h = DataHeader {
                    contributors: 1000,
                    ..data_header(0, 4000)
                };
                n.write(&h.encode());
            },
            ErrorKind::Protocol,
        ),
        (
            "half a payload and gone",
            |n| {
                n.write(&data_header(0, 4000).encode());
                n.write(&[1; 1001]);
                n.control.shutdown(std::net::Shutdown::Both).unwrap();
            },
            ErrorKind::PeerLost,
        ),
        (
            "garbage for its reason to abort",
            |n| n.notices.writer.say(&[0xAB; 300]),
            ErrorKind::Protocol,
        ),
        (
            "a reason of another length than it says",
            |n| n.notices.writer.say(&frame(ControlKind::Abort, 0, 9).encode()),
            ErrorKind::Protocol,
        ),
        (
            "a reason that is longer than there is room for",
            |n| n.notices.writer.claim(u32::MAX),
            ErrorKind::Protocol,
        ),
        (
            "a message for its reason to abort",
            |n| n.notices.writer.say(&frame(ControlKind::Offer, 0, 1).encode()),
            ErrorKind::Protocol,
        ),
        (
            "silence and gone",
            |n| n.control.shutdown(std::net::Shutdown::Both).unwrap(),
            ErrorKind::PeerLost,
        ),
    ];
    for blocking in [true, false] {
        for (what, misbehave, kind) in ways {
            let began = Instant::now();
            let e = after_neighbour(blocking, misbehave);
            assert_eq!(e.kind(), kind, "{what}, blocking {blocking}: {e}");
            assert_eq!(e.context().peer, Some(1), "{what}, blocking {blocking}: {e}");
            assert!(began.elapsed() < Duration::from_secs(10), "{what}");
        }
    }
}
