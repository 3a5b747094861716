//! Snapshots between members of a job that have credentials, and what others get of them.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ftcore::{Credentials, Epoch, Error, ErrorKind, Result, Step};
use identity::{Party, Role};
use oxccl_checkpoint::{
    CheckpointSource, Fetch, FetchOptions, Fetched, HttpTransport, Snapshot, StateDict, TransportOptions,
};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use crate::fake_source::{snapshot, state};

fn long() -> Instant {
    Instant::now() + Duration::from_secs(120)
}

fn party(credentials: &Credentials, name: &str) -> Arc<Party> {
    Party::new(credentials, Role::Replica(name.into())).unwrap()
}

fn job(folder: &std::path::Path) -> Arc<Credentials> {
    identity::create(folder, Some("demo")).unwrap();
    Credentials::load(folder).unwrap()
}

/// Serves step 5 as this party.
fn serving(party: &Arc<Party>, options: TransportOptions) -> HttpTransport {
    let options = TransportOptions {
        party: Some(Arc::clone(party)),
        ..options
    };
    let server = HttpTransport::start_with("127.0.0.1:0", None, options).unwrap();
    server.publish(snapshot(5, 64, 1.0));
    server
}

/// Fetches step 5 as this party from `url`, which must be replica `of`.
fn fetch_as(party: Option<&Arc<Party>>, of: &str, url: String) -> Result<Fetched> {
    let named = CheckpointSource::found_by(format!("replica '{of}'"), move |_| Ok(url));
    let options = FetchOptions {
        party: party.cloned(),
        ..FetchOptions::default()
    };
    Fetch::step(Step(5), vec![named.of_replica(of)]).run(long(), &options)
}

fn is_told(error: &Error, parts: &[&str]) {
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    for part in parts {
        assert!(error.to_string().contains(part), "'{part}' is not in: {error}");
    }
}

#[test]
fn a_member_fetches_from_the_replica_that_was_named_and_from_no_other_source() {
    let dir = tempfile::tempdir().unwrap();
    let own = job(&dir.path().join("own"));
    let other = job(&dir.path().join("other"));
    let me = party(&own, "me");
    let server = serving(&party(&own, "a"), TransportOptions::default());
    assert!(server.metadata().starts_with("https://"), "{}", server.metadata());
    let fetched = fetch_as(Some(&me), "a:1", server.metadata()).unwrap();
    assert_eq!(fetched.state, state(64, 1.0));
    // Member b, which says that it is a.
    let forger = serving(&party(&own, "b"), TransportOptions::default());
    let e = fetch_as(Some(&me), "a:1", forger.metadata()).unwrap_err();
    is_told(&e, &["replica 'a:1'", "proves to be replica 'b' of job demo"]);
    // A stranger under the same job id and name.
    let stranger = serving(&party(&other, "a"), TransportOptions::default());
    let e = fetch_as(Some(&me), "a:1", stranger.metadata()).unwrap_err();
    is_told(&e, &["replica 'a:1'", "certificate is not of job demo"]);
    // One without credentials, and one that only says that it has some.
    let open = HttpTransport::start("127.0.0.1:0", None).unwrap();
    open.publish(snapshot(5, 64, 1.0));
    let e = fetch_as(Some(&me), "a:1", open.metadata()).unwrap_err();
    is_told(&e, &["replica 'a:1'", "without credentials"]);
    let pretended = open.metadata().replace("http://", "https://");
    let e = fetch_as(Some(&me), "a:1", pretended).unwrap_err();
    is_told(&e, &["replica 'a:1'", "does not speak TLS"]);
    // Of several sources, the honest one is enough.
    let named = |url: String| CheckpointSource::found_by("a", move |_| Ok(url)).of_replica("a");
    let sources = [forger.metadata(), stranger.metadata(), server.metadata()];
    let options = FetchOptions {
        party: Some(me),
        ..FetchOptions::default()
    };
    let fetched = Fetch::step(Step(5), sources.map(named).into())
        .run(long(), &options)
        .unwrap();
    assert_eq!(fetched.state, state(64, 1.0));
}

#[test]
fn strangers_read_nothing_and_hold_nothing_while_a_member_reads() {
    let dir = tempfile::tempdir().unwrap();
    let own = job(&dir.path().join("own"));
    let other = job(&dir.path().join("other"));
    let me = party(&own, "me");
    let options = TransportOptions {
        max_connections: 4,
        greeting_timeout: Duration::from_millis(500),
        ..TransportOptions::default()
    };
    let server = serving(&party(&own, "a"), options);
    let e = fetch_as(Some(&party(&other, "me")), "a", server.metadata()).unwrap_err();
    is_told(&e, &["certificate is not of job demo"]);
    let e = fetch_as(None, "a", server.metadata()).unwrap_err();
    is_told(&e, &["asks for credentials", "OXCCL_CREDENTIALS"]);
    let path = server.metadata();
    let path = path.get(path.find("/ckpt").unwrap()..).unwrap();
    let mut held = Vec::new();
    for n in 0..200 {
        let mut stream = TcpStream::connect(server.local_addr()).unwrap();
        let _ = match n % 3 {
            0 => stream.write(&[0x16]),
            1 => stream.write(b""),
            _ => stream.write(format!("GET {path}/5/manifest HTTP/1.1\r\nhost: x\r\n\r\n").as_bytes()),
        };
        held.push(stream);
        if n % 50 == 0 {
            assert_eq!(
                fetch_as(Some(&me), "a", server.metadata()).unwrap().state,
                state(64, 1.0)
            );
        }
    }
    for mut stream in held {
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        let mut text = Vec::new();
        match stream.read_to_end(&mut text) {
            Ok(_) => {}
            Err(e) => assert_eq!(e.kind(), std::io::ErrorKind::ConnectionReset, "{e}"),
        }
        let text = String::from_utf8_lossy(&text);
        assert!(!text.contains("200 OK") && !text.contains("chunk"), "{text}");
    }
}

#[test]
fn a_member_that_stops_reading_in_the_middle_loses_its_place_to_another() {
    let dir = tempfile::tempdir().unwrap();
    let own = job(&dir.path().join("own"));
    let me = party(&own, "me");
    let options = TransportOptions {
        max_connections: 1,
        stall_timeout: Duration::from_millis(200),
        ..TransportOptions::default()
    };
    let server = serving(&party(&own, "a"), options);
    let mut large = StateDict::new();
    large.insert_f32("w", &[8 << 20], &vec![1.0; 8 << 20]).unwrap();
    server.publish(Snapshot::with_chunk_bytes(Step(6), Epoch(9), &large, 32 << 20).unwrap());
    let path = server.metadata();
    let path = path.get(path.find("/ckpt").unwrap()..).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let slow = runtime.block_on(async {
        let stream = tokio::net::TcpStream::connect(server.local_addr()).await.unwrap();
        let mut stream = me.connect(stream, None).await.unwrap();
        let ask = format!("GET {path}/6/chunk/1 HTTP/1.1\r\nhost: x\r\n\r\n");
        stream.write_all(ask.as_bytes()).await.unwrap();
        // The answer has begun, and holds the only place.
        stream.read_exact(&mut [0]).await.unwrap();
        stream
    });
    let fetched = fetch_as(Some(&party(&own, "other")), "a", server.metadata()).unwrap();
    assert_eq!(fetched.state, state(64, 1.0));
    drop(slow);
}

#[test]
fn without_credentials_it_listens_beyond_loopback_only_if_it_is_told_to() {
    let start = |insecure| {
        let options = TransportOptions {
            insecure,
            ..TransportOptions::default()
        };
        HttpTransport::start_with("0.0.0.0:0", None, options)
    };
    let e = start(false).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::InvalidArgument);
    assert!(e.message().contains("--insecure"), "{e}");
    assert!(start(true).unwrap().metadata().starts_with("http://"));
}
