//! Encrypted connections: what is seen on the wire, what becomes of bytes that are changed on the way, and who meets whom.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use backend_gloo::GlooGroup;
use ftcore::{
    DType, Error, ErrorKind, GroupOptions, ProcessGroup, ProcessGroupExt, ReduceOp, Result, SubmitOptions,
    Tensor, deadline_in,
};

use crate::credentials::{card, job};
use crate::ranks::{configuration, soon, store};

fn group_with(hints: &[(&str, &str)]) -> Result<GlooGroup> {
    let folder = job();
    let mut options = GroupOptions::default();
    let credentials = ("credentials", folder.to_str().unwrap());
    for (name, value) in [credentials, ("transport", "tcp")].iter().chain(hints) {
        options.hints.insert(name.to_string(), value.to_string());
    }
    GlooGroup::new("test", options)
}

/// Of the hello: what the caller says, and what the listener answers. Records follow.
const HELLO: [&[usize]; 2] = [&[80, 48], &[80]];
const OVERHEAD: usize = 20;

/// What happens to the second long record that goes in a direction.
#[derive(Debug, Clone, Copy)]
enum Tamper {
    Nothing,
    Flip,
    Drop,
    Replay,
    Swap,
    Truncate,
    /// Bytes from elsewhere.
    Forge,
}

/// Passes on all that goes through a connection, but for what `tamper` does to it in the direction `direction` (0: from the caller).
struct Between {
    tamper: Tamper,
    direction: usize,
    seen: Arc<Mutex<Vec<u8>>>,
}

impl Between {
    /// Where rank 1 is to call, instead of at `target`.
    fn start(self, target: SocketAddr) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let this = Arc::new(self);
        std::thread::spawn(move || {
            for caller in listener.incoming() {
                let (caller, listener) = (caller.unwrap(), TcpStream::connect(target).unwrap());
                let way = [(&caller, &listener), (&listener, &caller)];
                for (direction, (from, to)) in way.into_iter().enumerate() {
                    let (from, to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
                    let this = this.clone();
                    std::thread::spawn(move || {
                        let _ = this.pass(direction, &from, &to);
                        let _ = to.shutdown(Shutdown::Write);
                    });
                }
            }
        });
        address
    }

    fn pass(&self, direction: usize, mut from: &TcpStream, mut to: &TcpStream) -> std::io::Result<()> {
        if matches!(self.tamper, Tamper::Nothing) {
            let mut some = [0; 65536];
            loop {
                let n = from.read(&mut some)?;
                if n == 0 {
                    return Ok(());
                }
                self.seen.lock().unwrap().extend_from_slice(&some[..n]);
                to.write_all(&some[..n])?;
            }
        }
        for length in HELLO[direction] {
            let mut said = vec![0; *length];
            from.read_exact(&mut said)?;
            to.write_all(&said)?;
        }
        let (mut long, mut held) = (0, None);
        loop {
            let mut record = vec![0; 4];
            from.read_exact(&mut record)?;
            let length = u32::from_le_bytes(record[..].try_into().unwrap()) as usize;
            record.resize(length + OVERHEAD, 0);
            from.read_exact(&mut record[4..])?;
            long += usize::from(length > 10_000);
            if long == 2 && length > 10_000 && direction == self.direction {
                let middle = record.len() / 2;
                match self.tamper {
                    Tamper::Nothing => {}
                    Tamper::Flip => record[middle] ^= 1,
                    Tamper::Drop => continue,
                    Tamper::Replay => record.extend(record.clone()),
                    Tamper::Swap => {
                        held = Some(record);
                        continue;
                    }
                    Tamper::Truncate => record.truncate(middle),
                    Tamper::Forge => record.iter_mut().skip(4).for_each(|byte| *byte = 0xA5),
                }
            }
            to.write_all(&record)?;
            if let Some(held) = held.take() {
                to.write_all(&held)?;
            }
        }
    }
}

/// Two ranks whose connections go through `between`, each in `body`.
fn through<T: Send>(
    between: Between,
    hints: &[(&str, &str)],
    body: impl Fn(u32, GlooGroup) -> T + Sync,
) -> Vec<T> {
    let stores = [store(), store()];
    std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..2u32)
            .zip(&stores)
            .map(|(rank, store)| {
                let body = &body;
                scope.spawn(move || {
                    let group = group_with(hints).unwrap();
                    group.configure(configuration(store, 1, rank, 2)).unwrap();
                    body(rank, group)
                })
            })
            .collect();
        let [first, second] = &stores;
        let (target, _) = card(first.as_ref());
        let at = |port: u16| format!(":{port}");
        let of_first = String::from_utf8(first.get("test/1/gloo/0", soon()).unwrap()).unwrap();
        let rerouted = of_first.replace(&at(target.port()), &at(between.start(target).port()));
        second.set("test/1/gloo/0", rerouted.as_bytes(), soon()).unwrap();
        let of_second = second.get("test/1/gloo/1", soon()).unwrap();
        first.set("test/1/gloo/1", &of_second, soon()).unwrap();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

const PHRASE: &[u8; 16] = b"sixteen letters!";

#[test]
fn the_payload_is_on_the_wire_only_where_it_is_not_encrypted() {
    for (encrypt, connections) in [("0", "1"), ("1", "1"), ("1", "4")] {
        let seen = Arc::new(Mutex::new(Vec::new()));
        let between = Between {
            tamper: Tamper::Nothing,
            direction: 0,
            seen: seen.clone(),
        };
        let hints = [("encrypt", encrypt), ("connections", connections)];
        let bytes = PHRASE.repeat(200_000);
        let both = std::sync::Barrier::new(2);
        through(between, &hints, |rank, group| {
            let own = match rank {
                0 => bytes.clone(),
                _ => vec![0; bytes.len()],
            };
            // A collective, and messages both ways.
            let sent = group.broadcast(Tensor::from_vec(own), 0).unwrap();
            sent.wait(soon()).unwrap();
            assert!(sent.take_tensor().unwrap().bytes() == bytes);
            let to = group.send(Tensor::from_vec(bytes.clone()), 1 - rank, 0).unwrap();
            let from = group
                .recv(Tensor::zeros(DType::U8, bytes.len()), 1 - rank, 0)
                .unwrap();
            to.wait(soon()).unwrap();
            from.wait(soon()).unwrap();
            assert!(from.take_tensor().unwrap().bytes() == bytes);
            // What a rank says when it ends is seen as little.
            both.wait();
            if rank == 0 {
                group.abort("sixteen letters! as a reason");
            }
            both.wait();
        });
        let seen = seen.lock().unwrap();
        assert!(seen.len() > 3 * bytes.len(), "{}", seen.len());
        let found = seen.windows(PHRASE.len()).any(|window| window == PHRASE);
        assert_eq!(
            found,
            encrypt == "0",
            "encrypt={encrypt}, connections={connections}"
        );
    }
}

#[test]
fn bytes_that_are_changed_on_the_way_end_the_group_with_the_peers_name_and_no_wrong_result() {
    let tampers = [
        Tamper::Flip,
        Tamper::Drop,
        Tamper::Replay,
        Tamper::Swap,
        Tamper::Truncate,
        Tamper::Forge,
    ];
    let cases: Vec<_> = tampers
        .into_iter()
        .flat_map(|t| [(t, 0, "1"), (t, 1, "4")])
        .collect();
    for (tamper, direction, connections) in cases {
        for messages in [false, true] {
            let between = Between {
                tamper,
                direction,
                seen: Arc::default(),
            };
            let hints = [("encrypt", "1"), ("connections", connections)];
            let case =
                format!("{tamper:?}, direction {direction}, {connections} connections, messages {messages}");
            let ends: Vec<std::result::Result<(), Error>> = through(between, &hints, |rank, group| {
                // Long enough that every connection carries several records.
                let count = 1 << 20;
                let work = match messages {
                    false => {
                        group.all_reduce(Tensor::from_vec(vec![rank as f32 + 1.0; count]), ReduceOp::Sum)
                    }
                    true if rank as usize == direction => {
                        group.recv(Tensor::zeros(DType::F32, count), 1 - rank, 0)
                    }
                    true => group.send(Tensor::from_vec(vec![3.0f32; count]), 1 - rank, 0),
                };
                let work = work.unwrap();
                work.wait(soon())?;
                let tensor = work.take_tensor()?;
                let sums = tensor
                    .bytes()
                    .chunks_exact(4)
                    .map(|b| f32::from_ne_bytes(b.try_into().unwrap()));
                assert!(
                    sums.into_iter().all(|sum| sum == 3.0),
                    "{case}: a wrong result on rank {rank}"
                );
                Ok(())
            });
            // The caller is rank 1: what it sends is read by rank 0.
            let (reader, other) = (direction, 1 - direction);
            let error = ends[reader].as_ref().expect_err(&case);
            assert_eq!(error.kind(), ErrorKind::Protocol, "{case}: {error}");
            assert_eq!(error.context().peer, Some(other as u32), "{case}: {error}");
            assert!(error.to_string().contains("does not open"), "{case}: {error}");
        }
    }
}

#[test]
fn ranks_that_do_not_agree_about_encryption_do_not_meet_and_are_told_why() {
    let ranks = |first: &str, second: &str| {
        let store = store();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut c = configuration(&store, 1, 0, 2);
                c.deadline = deadline_in(Duration::from_secs(3));
                let e = group_with(&[("encrypt", first)])
                    .unwrap()
                    .configure(c)
                    .unwrap_err();
                assert_eq!(e.kind(), ErrorKind::Timeout, "{e}");
                assert!(e.to_string().contains("one of the two encrypts"), "{e}");
            });
            let group = group_with(&[("encrypt", second)]).unwrap();
            let e = group.configure(configuration(&store, 1, 1, 2)).unwrap_err();
            assert_eq!(e.kind(), ErrorKind::Protocol, "{e}");
            assert_eq!(e.context().peer, Some(0), "{e}");
            assert!(e.to_string().contains("OXCCL_ENCRYPT"), "{e}");
        });
    };
    std::thread::scope(|scope| {
        scope.spawn(|| ranks("1", "0"));
        ranks("0", "1");
    });
}

#[test]
fn a_downgrade_on_the_way_is_refused() {
    // A party between two ranks that encrypt changes the caller's wish, so that neither would.
    let stores = [store(), store()];
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::scope(|scope| {
        let configure = |rank: u32, seconds: u64| {
            let mut c = configuration(&stores[rank as usize], 1, rank, 2);
            c.deadline = deadline_in(Duration::from_secs(seconds));
            group_with(&[("encrypt", "1")]).unwrap().configure(c)
        };
        let first = scope.spawn(move || configure(0, 3));
        let second = scope.spawn(move || configure(1, 20));
        let (target, _) = card(stores[0].as_ref());
        let of_first = String::from_utf8(stores[0].get("test/1/gloo/0", soon()).unwrap()).unwrap();
        let rerouted = of_first.replace(&format!(":{}", target.port()), &format!(":{port}"));
        stores[1]
            .set("test/1/gloo/0", rerouted.as_bytes(), soon())
            .unwrap();
        let (mut caller, _) = listener.accept().unwrap();
        let mut rank0 = TcpStream::connect(target).unwrap();
        let mut open = [0; 80];
        caller.read_exact(&mut open).unwrap();
        assert_eq!(open[16 + 15], 1, "the wish");
        open[16 + 15] = 0;
        rank0.write_all(&open).unwrap();
        let mut told = [0; 16];
        rank0.read_exact(&mut told).unwrap();
        caller.write_all(&told).unwrap();
        let e = second.join().unwrap().unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Protocol, "{e}");
        first.join().unwrap().unwrap_err();
    });
}

#[test]
fn encryption_without_credentials_is_refused_by_name() {
    let options = |encrypt: &str| {
        let mut options = GroupOptions::default();
        options.hints.insert("encrypt".into(), encrypt.into());
        GlooGroup::new("test", options)
    };
    let e = options("1").map(drop).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::InvalidArgument);
    assert!(e.to_string().contains("OXCCL_CREDENTIALS"), "{e}");
    let e = options("yes").map(drop).unwrap_err();
    assert!(e.to_string().contains("encrypt=yes"), "{e}");
    options("0").unwrap();
}

/// What encryption costs: run with `--release --ignored --nocapture`.
#[test]
#[ignore = "measures: prints speed and latency over TCP, plain and encrypted"]
fn what_encryption_costs() {
    fn timed(encrypt: &str, count: usize, rounds: usize, take: Sender<Vec<Duration>>) {
        let store = store();
        std::thread::scope(|scope| {
            for rank in 0..2u32 {
                let (store, take) = (&store, take.clone());
                scope.spawn(move || {
                    let group = group_with(&[("encrypt", encrypt)]).unwrap();
                    group.configure(configuration(store, 1, rank, 2)).unwrap();
                    let mut data = vec![1.0f32; count];
                    let mut times = Vec::new();
                    for _ in 0..rounds {
                        let began = std::time::Instant::now();
                        let by = SubmitOptions::by(soon());
                        group.all_reduce_slice_with(&mut data, ReduceOp::Max, by).unwrap();
                        times.push(began.elapsed());
                    }
                    if rank == 0 {
                        take.send(times).unwrap();
                    }
                });
            }
        });
    }
    for (what, count, rounds) in [("64 MiB", 16 << 20, 8), ("4 B", 1, 4000)] {
        let mut medians = [Vec::new(), Vec::new()];
        for _ in 0..3 {
            for (encrypt, medians) in ["0", "1"].into_iter().zip(&mut medians) {
                let (take, taken): (_, Receiver<Vec<Duration>>) = channel();
                timed(encrypt, count, rounds, take);
                let mut times = taken.recv().unwrap();
                times.sort();
                medians.push(times[times.len() / 2]);
            }
        }
        let [plain, sealed] = medians.map(|mut all| {
            all.sort();
            all[all.len() / 2]
        });
        println!(
            "all_reduce of {what}, 2 ranks over TCP: plain {plain:.1?} ({:.2} GB/s), encrypted {sealed:.1?}: {:.2} times as long",
            (count * 4) as f64 / plain.as_secs_f64() / 1e9,
            sealed.as_secs_f64() / plain.as_secs_f64()
        );
    }
}
