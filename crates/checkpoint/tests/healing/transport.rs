//! Given the real server: what readers get, and that they cannot disturb the source.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use ftcore::{Epoch, ErrorKind, Step};
use oxccl_checkpoint::{HttpTransport, Manifest, Snapshot, StateDict, TransportOptions, decode};

use crate::fake_source::{snapshot, state};
use crate::fetch;

const LONG: Duration = Duration::from_secs(120);

fn long() -> Instant {
    Instant::now() + LONG
}

fn server() -> HttpTransport {
    HttpTransport::start("127.0.0.1:0", None).unwrap()
}

/// A reader that decides itself when it reads.
struct Reader {
    stream: TcpStream,
    prefix: String,
}

impl Reader {
    fn connect(server: &HttpTransport) -> Self {
        let stream = TcpStream::connect(server.local_addr()).unwrap();
        stream.set_read_timeout(Some(LONG)).unwrap();
        stream.set_nodelay(true).unwrap();
        let url = server.metadata();
        let prefix = url[url.find("/ckpt").unwrap()..].to_owned();
        Self { stream, prefix }
    }

    fn ask(&mut self, path: &str, header: &str) {
        write!(
            self.stream,
            "GET {}{path} HTTP/1.1\r\nhost: x\r\n{header}\r\n",
            self.prefix
        )
        .unwrap();
    }

    /// Status and body of the next answer.
    fn answer(&mut self) -> (u16, Vec<u8>) {
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            let mut byte = [0];
            self.stream.read_exact(&mut byte).unwrap();
            head.push(byte[0]);
        }
        let head = String::from_utf8(head).unwrap().to_lowercase();
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        let length = head
            .split("content-length: ")
            .nth(1)
            .unwrap()
            .split("\r\n")
            .next()
            .unwrap();
        let mut body = vec![0; length.parse().unwrap()];
        self.stream.read_exact(&mut body).unwrap();
        (status, body)
    }

    fn get(&mut self, path: &str, header: &str) -> (u16, String) {
        self.ask(path, header);
        let (status, body) = self.answer();
        (status, String::from_utf8_lossy(&body).into_owned())
    }

    fn manifest(&mut self, step: i64) -> Manifest {
        let (status, json) = self.get(&format!("/{step}/manifest"), "");
        assert_eq!(status, 200, "{json}");
        Manifest::parse(json.as_bytes(), u64::MAX).unwrap()
    }

    fn chunk(&mut self, step: i64, i: usize) -> Vec<u8> {
        self.ask(&format!("/{step}/chunk/{i}"), "");
        let (status, body) = self.answer();
        assert_eq!(status, 200, "{}", String::from_utf8_lossy(&body));
        body
    }
}

#[test]
fn a_state_arrives_whole_with_its_epoch_from_one_or_several_sources() {
    let (a, b) = (server(), server());
    for s in [&a, &b] {
        s.publish(snapshot(5, 64, 3.0));
    }
    for sources in [
        vec![a.metadata()],
        vec![a.metadata(), b.metadata()],
        vec![a.metadata(), a.metadata()],
    ] {
        assert_eq!(
            fetch(&sources, Step(5), long()).unwrap(),
            (Epoch(9), state(64, 3.0))
        );
    }
    a.publish(Snapshot::new(Step(6), Epoch(0), &StateDict::new()).unwrap());
    assert_eq!(
        fetch(&[a.metadata()], Step(6), long()).unwrap(),
        (Epoch(0), StateDict::new())
    );
}

#[test]
fn fetching_works_from_inside_an_async_runtime() {
    let server = server();
    server.publish(snapshot(5, 4, 3.0));
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let (epoch, _) = runtime
        .block_on(async { fetch(&[server.metadata()], Step(5), long()) })
        .unwrap();
    assert_eq!(epoch, Epoch(9));
}

#[test]
fn l10_training_on_while_a_reader_downloads_does_not_change_what_it_receives() {
    let server = server();
    let mut live = state(64, 3.0);
    server.publish(Snapshot::with_chunk_bytes(Step(5), Epoch(9), &live, 4096).unwrap());
    let mut reader = Reader::connect(&server);
    let manifest = reader.manifest(5);
    let mut bytes = Vec::new();
    for i in 0..manifest.chunk_count() {
        if i == manifest.chunk_count() / 2 {
            // The next step, in place, and its snapshot.
            let n = live.get("b/own").unwrap().shape[0];
            live.insert_f32("a/same", &[n], &vec![-1.0; n]).unwrap();
            live.insert_f32("b/own", &[n], &vec![-2.0; n]).unwrap();
            server.publish(Snapshot::with_chunk_bytes(Step(6), Epoch(9), &live, 4096).unwrap());
        }
        bytes.extend(reader.chunk(5, i));
    }
    assert_eq!(decode(&bytes).unwrap(), state(64, 3.0));
    assert_eq!(
        fetch(&[server.metadata()], Step(6), long()).unwrap(),
        (Epoch(9), live)
    );
}

#[test]
fn l29_readers_that_never_read_block_neither_publish_nor_retire_nor_other_readers() {
    let server = Arc::new(server());
    // Larger than what sockets buffer.
    let mut large = StateDict::new();
    large.insert_f32("w", &[8 << 20], &vec![1.0; 8 << 20]).unwrap();
    let large = Snapshot::with_chunk_bytes(Step(0), Epoch(9), &large, 32 << 20).unwrap();
    let freed = Arc::downgrade(&large);
    server.publish(large);
    let mut slow: Vec<Reader> = (0..4).map(|_| Reader::connect(&server)).collect();
    for reader in &mut slow {
        reader.manifest(0);
        reader.ask("/0/chunk/1", "");
        // The answer has begun, so its writer is at work; it is not read further.
        let mut one = [0];
        reader.stream.read_exact(&mut one).unwrap();
    }
    let (done, finished) = mpsc::channel();
    let trainer = Arc::clone(&server);
    std::thread::spawn(move || {
        for step in 1..=50 {
            trainer.publish(snapshot(step, 4, 3.0));
            if step % 2 == 0 {
                trainer.retire();
            }
        }
        trainer.publish(snapshot(51, 4, 3.0));
        done.send(()).unwrap();
    });
    finished
        .recv_timeout(LONG)
        .expect("publish or retire waits for a reader");
    assert_eq!(
        fetch(&[server.metadata()], Step(51), long()).unwrap().1,
        state(4, 3.0)
    );
    // They end; so does the last reason to keep their snapshot.
    drop(slow);
    let deadline = long();
    while freed.strong_count() > 0 {
        assert!(Instant::now() < deadline, "the retired snapshot is never freed");
        std::thread::yield_now();
    }
}

#[test]
fn l31_a_reader_in_the_middle_finishes_after_the_source_went_on() {
    let server = server();
    server.publish(snapshot(5, 64, 3.0));
    let mut reader = Reader::connect(&server);
    let manifest = reader.manifest(5);
    let mut bytes = reader.chunk(5, 0);
    server.retire();
    assert_eq!(server.published_steps(), []);
    let mut late = Reader::connect(&server);
    assert_eq!(late.get("/5/manifest", "").0, 404);
    for step in 6..9 {
        server.publish(snapshot(step, 64, 4.0));
    }
    assert_eq!(late.get("/5/manifest", "").0, 409);
    for i in 1..manifest.chunk_count() {
        bytes.extend(reader.chunk(5, i));
    }
    assert_eq!(decode(&bytes).unwrap(), state(64, 3.0));
}

#[test]
fn a_request_for_a_step_to_come_waits_until_it_is_published() {
    let server = server();
    server.publish(snapshot(4, 4, 3.0));
    let mut reader = Reader::connect(&server);
    reader.ask("/5/manifest", "x-oxccl-wait-ms: 60000\r\n");
    // No answer can come before the step is there.
    reader
        .stream
        .set_read_timeout(Some(Duration::from_millis(50)))
        .unwrap();
    reader.stream.read_exact(&mut [0]).unwrap_err();
    reader.stream.set_read_timeout(Some(LONG)).unwrap();
    let url = server.metadata();
    let healing = std::thread::spawn(move || fetch(&[url], Step(5), long()));
    server.publish(snapshot(5, 4, 7.0));
    assert_eq!(reader.answer().0, 200);
    assert_eq!(healing.join().unwrap().unwrap(), (Epoch(9), state(4, 7.0)));
}

#[test]
fn a_wait_is_bounded_by_its_header_and_says_what_is_served() {
    let server = server();
    server.publish(snapshot(4, 4, 3.0));
    let mut reader = Reader::connect(&server);
    for header in ["", "x-oxccl-wait-ms: 30\r\n", "x-oxccl-wait-ms: soon\r\n"] {
        let (status, text) = reader.get("/5/manifest", header);
        assert_eq!(status, 404);
        assert!(text.starts_with("serving step 4, asked for 5"), "{text}");
    }
    let e = fetch(
        &[server.metadata()],
        Step(5),
        Instant::now() + Duration::from_secs(1),
    )
    .unwrap_err();
    assert_eq!(e.kind(), ErrorKind::Timeout);
    assert!(e.message().contains("has not published"), "{e}");
}

#[test]
fn an_older_step_is_refused_at_once_with_both_steps_named() {
    let server = server();
    server.publish(snapshot(5, 4, 3.0));
    let e = fetch(&[server.metadata()], Step(3), long()).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::NotFound);
    assert!(e.message().contains("serving step 5, asked for 3"), "{e}");
    let mut reader = Reader::connect(&server);
    assert_eq!(reader.get("/3/chunk/0", "").0, 409);
    assert_eq!(reader.get("/5/chunk/999", "").0, 416);
}

#[test]
fn l38_nothing_but_reading_is_served_and_only_under_the_prefix_of_this_incarnation() {
    let server = server();
    server.publish(snapshot(5, 4, 3.0));
    for method in ["POST", "PUT", "DELETE", "HEAD", "OPTIONS"] {
        let mut reader = Reader::connect(&server);
        write!(
            reader.stream,
            "{method} {}/5/manifest HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n",
            reader.prefix
        )
        .unwrap();
        let mut first = [0; 12];
        reader.stream.read_exact(&mut first).unwrap();
        assert_eq!(&first, b"HTTP/1.1 405", "{method}");
    }
    let mut reader = Reader::connect(&server);
    for path in [
        "",
        "/",
        "/5",
        "/5/",
        "/5/kill",
        "/x/manifest",
        "/5/manifest/",
        "/5/chunk/-1",
        "/5/chunk/0/0",
    ] {
        assert_eq!(reader.get(path, "").0, 400, "{path}");
    }
    reader.prefix = "/ckpt/0000000000000000".into();
    assert_eq!(reader.get("/5/manifest", "").0, 400);
    let e = fetch(&[server.metadata().replace("/ckpt/", "/other/")], Step(5), long()).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::Protocol);
    assert_eq!(
        fetch(&[server.metadata()], Step(5), long()).unwrap(),
        (Epoch(9), state(4, 3.0))
    );
}

#[test]
fn random_bytes_and_oversized_requests_do_not_disturb_the_server() {
    let server = server();
    server.publish(snapshot(5, 4, 3.0));
    let mut seed = 1u32;
    let mut noise = |n: usize| -> Vec<u8> {
        let mut next = || {
            seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (seed >> 24) as u8
        };
        (0..n).map(|_| next()).collect()
    };
    let mut inputs: Vec<Vec<u8>> = (0..40).map(|i| noise(1 << (i % 14))).collect();
    inputs.push(format!("GET /{} HTTP/1.1\r\n\r\n", "a".repeat(1 << 20)).into_bytes());
    inputs.push(format!("GET / HTTP/1.1\r\n{}\r\n", "a: b\r\n".repeat(1000)).into_bytes());
    inputs.push(b"GET / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nFFFFFFFFFFFFFFFFF\r\n".to_vec());
    inputs.push(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec());
    for input in inputs {
        let mut stream = TcpStream::connect(server.local_addr()).unwrap();
        stream.set_read_timeout(Some(LONG)).unwrap();
        // The server may close before it has read everything.
        let _ = stream.write_all(&input);
        let _ = stream.shutdown(std::net::Shutdown::Write);
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        assert!(
            answer.is_empty() || answer.starts_with(b"HTTP/1.1 4"),
            "{:?}",
            String::from_utf8_lossy(&answer)
        );
    }
    assert_eq!(
        fetch(&[server.metadata()], Step(5), long()).unwrap(),
        (Epoch(9), state(4, 3.0))
    );
}

fn tight(f: impl FnOnce(&mut TransportOptions)) -> HttpTransport {
    let mut options = TransportOptions {
        greeting_timeout: LONG,
        idle_timeout: LONG,
        stall_timeout: LONG,
        ..TransportOptions::default()
    };
    f(&mut options);
    HttpTransport::start_with("127.0.0.1:0", None, options).unwrap()
}

#[test]
fn silent_connections_lose_their_place_to_those_that_ask() {
    let server = tight(|o| {
        o.max_connections = 2;
        o.idle_timeout = Duration::from_millis(200);
    });
    server.publish(snapshot(5, 4, 3.0));
    let silent: Vec<Reader> = (0..6).map(|_| Reader::connect(&server)).collect();
    assert_eq!(
        fetch(&[server.metadata()], Step(5), long()).unwrap(),
        (Epoch(9), state(4, 3.0))
    );
    drop(silent);
}

#[test]
fn a_thousand_silent_connections_make_room_for_one_that_asks_long_before_their_time_is_over() {
    let server = tight(|o| o.max_connections = 8);
    server.publish(snapshot(5, 4, 3.0));
    let mut silent: Vec<Reader> = (0..1000).map(|_| Reader::connect(&server)).collect();
    // These have asked once, and keep their connection.
    let _kept: Vec<Reader> = (0..10)
        .map(|_| {
            let mut reader = Reader::connect(&server);
            reader.manifest(5);
            reader
        })
        .collect();
    assert_eq!(
        fetch(&[server.metadata()], Step(5), long()).unwrap(),
        (Epoch(9), state(4, 3.0))
    );
    // Who came first has made room.
    assert_eq!(silent[0].stream.read(&mut [0]).unwrap_or(0), 0);
}

#[test]
fn who_never_finishes_its_first_request_is_gone_after_the_greeting_time() {
    let server = tight(|o| o.greeting_timeout = Duration::from_millis(300));
    server.publish(snapshot(5, 4, 3.0));
    let mut asked = Reader::connect(&server);
    asked.manifest(5);
    for beginning in ["", "G", "GET /x HTTP/1.1\r\nHost: a\r\nA: "] {
        let mut reader = Reader::connect(&server);
        reader.stream.write_all(beginning.as_bytes()).unwrap();
        // Another byte now and then, for as long as the peer listens.
        reader
            .stream
            .set_read_timeout(Some(Duration::from_millis(20)))
            .unwrap();
        let begun = Instant::now();
        while begun.elapsed() < LONG / 2 {
            match reader.stream.read(&mut [0]) {
                Err(e)
                    if matches!(
                        e.kind(),
                        std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut
                    ) => {}
                _ => break,
            }
            if beginning.len() > 1 && reader.stream.write_all(b"x").is_err() {
                break;
            }
        }
        assert!(begun.elapsed() < LONG / 2, "{beginning:?} holds its connection");
    }
    // Who has asked once may think for longer than that.
    asked.manifest(5);
}

#[test]
fn a_reader_that_stops_reading_loses_its_place() {
    let server = tight(|o| {
        o.max_connections = 1;
        o.stall_timeout = Duration::from_millis(200);
    });
    let mut large = StateDict::new();
    large.insert_f32("w", &[8 << 20], &vec![1.0; 8 << 20]).unwrap();
    server.publish(Snapshot::with_chunk_bytes(Step(5), Epoch(9), &large, 32 << 20).unwrap());
    server.publish(snapshot(6, 4, 3.0));
    let mut slow = Reader::connect(&server);
    slow.ask("/5/chunk/1", "");
    slow.stream.read_exact(&mut [0]).unwrap();
    assert_eq!(
        fetch(&[server.metadata()], Step(6), long()).unwrap(),
        (Epoch(9), state(4, 3.0))
    );
}

#[test]
fn after_a_shutdown_or_a_drop_nobody_answers_and_waiting_readers_are_told() {
    let server = server();
    let url = server.metadata();
    let mut waiting = Reader::connect(&server);
    // It has been accepted once it has an answer, and what it asks then comes before the next connection: the server's one
    // thread takes both in the order in which they came. Without that it may be shut down before it has read the question.
    assert_eq!(waiting.get("/5/manifest", "").0, 404);
    waiting.ask("/5/manifest", "x-oxccl-wait-ms: 60000\r\n");
    assert_eq!(Reader::connect(&server).get("/5/manifest", "").0, 404);
    server.shutdown(long()).unwrap();
    assert_eq!(waiting.answer().0, 503);
    server.publish(snapshot(5, 4, 3.0));
    assert!(server.published_steps().is_empty());
    assert_eq!(
        fetch(&[url], Step(5), long()).unwrap_err().kind(),
        ErrorKind::Unavailable
    );

    let dropped = self::server();
    dropped.publish(snapshot(5, 4, 3.0));
    let url = dropped.metadata();
    let mut reader = Reader::connect(&dropped);
    reader.manifest(5);
    drop(dropped);
    // The end of the connection is the end of the thread's work.
    assert_eq!(reader.stream.read(&mut [0]).unwrap_or(0), 0);
    let e = fetch(&[url], Step(5), long()).unwrap_err();
    assert!(
        matches!(e.kind(), ErrorKind::Unavailable | ErrorKind::PeerLost),
        "{e}"
    );
}

#[test]
fn a_shutdown_ends_at_its_deadline_and_counts_the_readers_cut_off() {
    let server = tight(|_| {});
    let mut large = StateDict::new();
    large.insert_f32("w", &[8 << 20], &vec![1.0; 8 << 20]).unwrap();
    server.publish(Snapshot::with_chunk_bytes(Step(5), Epoch(9), &large, 32 << 20).unwrap());
    let mut slow = Reader::connect(&server);
    slow.ask("/5/chunk/1", "");
    slow.stream.read_exact(&mut [0]).unwrap();
    let e = server
        .shutdown(Instant::now() + Duration::from_millis(100))
        .unwrap_err();
    assert_eq!(e.kind(), ErrorKind::Timeout);
    assert!(e.message().contains("1 connections"), "{e}");
}
