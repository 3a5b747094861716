//! Sources that misbehave: a small HTTP server that answers from a snapshot unless told otherwise for a request.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use ftcore::{Epoch, Step};
use oxccl_checkpoint::{Snapshot, StateDict};

/// What a request is for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Asked {
    Manifest,
    Chunks(Vec<usize>),
}

impl Asked {
    /// True if the request is for chunk `i`, among others.
    pub(crate) fn has(&self, i: usize) -> bool {
        matches!(self, Self::Chunks(all) if all.contains(&i))
    }

    pub(crate) fn is_chunks(&self) -> bool {
        matches!(self, Self::Chunks(_))
    }
}

/// What the source does with it.
pub(crate) enum Reply {
    /// What an honest source would send.
    Honest,
    /// 200 with this body.
    Body(Vec<u8>),
    /// This many bytes of an honest body, then the connection is closed.
    Cut(usize),
    /// These bytes as they are, then the connection is closed.
    Raw(Vec<u8>),
    /// 200 without a length, zeros without an end.
    Endless,
    /// Nothing; the connection stays open.
    Hang,
    /// The source is gone: listener and all connections are closed.
    Die,
}

struct Shared {
    snapshot: Arc<Snapshot>,
    dead: AtomicBool,
    requests: AtomicUsize,
    /// Bytes of chunks.
    sent: AtomicUsize,
    open: Mutex<Vec<TcpStream>>,
}

/// A source on a loopback port; its threads end when it is dropped.
pub(crate) struct FakeSource {
    shared: Arc<Shared>,
    address: std::net::SocketAddr,
}

impl FakeSource {
    /// Serves `snapshot`; `reply(asked, n)` decides about the n-th request (from 0) of this source.
    pub(crate) fn start(
        snapshot: &Arc<Snapshot>,
        reply: impl Fn(&Asked, usize) -> Reply + Send + Sync + 'static,
    ) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let shared = Arc::new(Shared {
            snapshot: Arc::clone(snapshot),
            dead: AtomicBool::new(false),
            requests: AtomicUsize::new(0),
            sent: AtomicUsize::new(0),
            open: Mutex::default(),
        });
        let reply = Arc::new(reply);
        let for_thread = Arc::clone(&shared);
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let Ok(stream) = stream else { break };
                if for_thread.dead.load(Ordering::SeqCst) {
                    break;
                }
                for_thread.open.lock().unwrap().push(stream.try_clone().unwrap());
                let (shared, reply) = (Arc::clone(&for_thread), Arc::clone(&reply));
                std::thread::spawn(move || {
                    // A broken connection ends its thread; that is all that can be done about it.
                    let _ = serve(stream, &shared, address, &*reply);
                });
            }
        });
        Self { shared, address }
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}/fake", self.address)
    }

    pub(crate) fn address(&self) -> String {
        self.address.to_string()
    }

    /// How many requests came so far.
    pub(crate) fn requests(&self) -> usize {
        self.shared.requests.load(Ordering::SeqCst)
    }

    /// How many bytes of chunks it sent so far.
    pub(crate) fn sent(&self) -> usize {
        self.shared.sent.load(Ordering::SeqCst)
    }
}

impl Drop for FakeSource {
    fn drop(&mut self) {
        die(&self.shared, self.address);
    }
}

fn die(shared: &Shared, address: std::net::SocketAddr) {
    if !shared.dead.swap(true, Ordering::SeqCst) {
        // Wakes the accept, which sees `dead` and closes the listener.
        let _ = TcpStream::connect(address);
    }
    for stream in shared.open.lock().unwrap().drain(..) {
        let _ = stream.shutdown(Shutdown::Both);
    }
}

fn serve(
    stream: TcpStream,
    shared: &Shared,
    address: std::net::SocketAddr,
    reply: &dyn Fn(&Asked, usize) -> Reply,
) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    let mut out = stream.try_clone()?;
    let mut lines = BufReader::new(stream).lines();
    loop {
        let Some(first) = lines.next() else { return Ok(()) };
        let first = first?;
        for line in lines.by_ref() {
            if line?.is_empty() {
                break;
            }
        }
        let asked = match first.split(['/', ' ']).collect::<Vec<_>>()[..] {
            ["GET", _, "fake", _, "manifest", ..] => Asked::Manifest,
            ["GET", _, "fake", _, "chunk", list, ..] => Asked::Chunks(chunks(list)),
            _ => panic!("the client asked for {first}"),
        };
        let number = shared.requests.fetch_add(1, Ordering::SeqCst);
        let body = match reply(&asked, number) {
            Reply::Honest => honest(&shared.snapshot, &asked),
            Reply::Cut(bytes) => {
                let body = honest(&shared.snapshot, &asked);
                write!(out, "HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n", body.len())?;
                out.write_all(&body[..bytes.min(body.len())])?;
                shared.sent.fetch_add(bytes.min(body.len()), Ordering::SeqCst);
                return out.shutdown(Shutdown::Both);
            }
            Reply::Body(body) => body,
            Reply::Raw(bytes) => {
                out.write_all(&bytes)?;
                return out.shutdown(Shutdown::Both);
            }
            Reply::Endless => {
                out.write_all(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")?;
                loop {
                    out.write_all(b"1000\r\n")?;
                    out.write_all(&[0; 0x1000])?;
                    out.write_all(b"\r\n")?;
                }
            }
            Reply::Hang => {
                let mut rest = Vec::new();
                return out.read_to_end(&mut rest).map(drop);
            }
            Reply::Die => {
                die(shared, address);
                return Ok(());
            }
        };
        write!(out, "HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n", body.len())?;
        if asked.is_chunks() {
            shared.sent.fetch_add(body.len(), Ordering::SeqCst);
        }
        out.write_all(&body)?;
    }
}

/// `3-5,7` as numbers.
fn chunks(list: &str) -> Vec<usize> {
    let number = |text: &str| text.parse::<usize>().unwrap();
    let range = |text: &str| match text.split_once('-') {
        Some((first, last)) => number(first)..=number(last),
        None => number(text)..=number(text),
    };
    list.split(',').flat_map(range).collect()
}

pub(crate) fn honest(snapshot: &Snapshot, asked: &Asked) -> Vec<u8> {
    match asked {
        Asked::Manifest => snapshot.manifest().to_json().unwrap(),
        Asked::Chunks(all) => all
            .iter()
            .flat_map(|i| snapshot.chunk(*i).unwrap().to_vec())
            .collect(),
    }
}

/// A state of about `kib` KiB whose content depends on `seed` in the second half only.
pub(crate) fn state(kib: usize, seed: f32) -> StateDict {
    let mut s = StateDict::new();
    let half = kib * 128;
    let values: Vec<f32> = (0..half).map(|i| i as f32).collect();
    s.insert_f32("a/same", &[half], &values).unwrap();
    let values: Vec<f32> = values.iter().map(|v| v * seed).collect();
    s.insert_f32("b/own", &[half], &values).unwrap();
    s.insert_i64s("c/count", &[seed as i64]).unwrap();
    s.set_metadata("seed", seed.to_string());
    s
}

/// [`state`] as a snapshot of `step` in epoch 9, in chunks of 4 KiB.
pub(crate) fn snapshot(step: i64, kib: usize, seed: f32) -> Arc<Snapshot> {
    Snapshot::with_chunk_bytes(Step(step), Epoch(9), &state(kib, seed), 4096).unwrap()
}
