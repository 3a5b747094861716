//! Given sources that lie, break, hang or die: a fetch ends with the right state or a typed error, in time.

use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use ftcore::{Epoch, Error, ErrorKind, Step};
use oxccl_checkpoint::{CheckpointSource, Fetch, FetchOptions, Manifest, StateDict};

use crate::fake_source::{Asked, FakeSource, Reply, honest, snapshot, state};
use crate::{fetch, fetch_with};

/// Far beyond what any of these tests takes when it passes.
const LONG: Duration = Duration::from_secs(120);

/// Several times the pause after which a source that may be asked again is.
const AGAIN: Duration = Duration::from_millis(300);

fn long() -> Instant {
    Instant::now() + LONG
}

fn fails(source: &FakeSource, options: &FetchOptions) -> Error {
    let deadline = long();
    let e = fetch_with(&[source.url()], Step(5), deadline, options).unwrap_err();
    assert!(
        Instant::now() < deadline,
        "the error came with the deadline only: {e}"
    );
    assert!(
        e.to_string().contains(&source.address()),
        "the source is not named: {e}"
    );
    e
}

fn good() -> (Epoch, StateDict) {
    (Epoch(9), state(64, 3.0))
}

/// A source whose chunk 3 has one bit flipped.
fn tampered() -> FakeSource {
    tampered_and(|| {})
}

/// The same, which calls `asked_for_it` before it answers with that chunk.
fn tampered_and(asked_for_it: impl Fn() + Send + Sync + 'static) -> FakeSource {
    let snap = snapshot(5, 64, 3.0);
    let copy = snap.clone();
    FakeSource::start(&snap, move |asked, _| {
        let Asked::Chunks(all) = asked else {
            return Reply::Honest;
        };
        let Some(at) = all.iter().position(|i| *i == 3) else {
            return Reply::Honest;
        };
        asked_for_it();
        let mut body = honest(&copy, asked);
        let before: usize = all[..at].iter().map(|i| copy.chunk(*i).unwrap().len()).sum();
        body[before + 100] ^= 1;
        Reply::Body(body)
    })
}

#[test]
fn a_source_that_sends_wrong_bytes_is_named_and_never_asked_again_while_another_heals() {
    let snap = snapshot(5, 64, 3.0);
    for order in [true, false] {
        let wrong = Arc::new((Mutex::new(0), Condvar::new()));
        let (tell, hear) = (wrong.clone(), wrong.clone());
        let bad = tampered_and(move || {
            *tell.0.lock().unwrap() += 1;
            tell.1.notify_all();
        });
        // Brings no chunk before the bad one was asked for that (were this one asked for it, its standstill would have it asked there), and
        // leaves time to ask it again.
        let other = FakeSource::start(&snap, move |asked, _| {
            if asked.is_chunks() {
                let times = hear.0.lock().unwrap();
                let (times, _) = hear.1.wait_timeout_while(times, LONG, |n| *n < 1).unwrap();
                drop(hear.1.wait_timeout_while(times, AGAIN, |n| *n < 2).unwrap());
            }
            Reply::Honest
        });
        let urls = if order {
            [bad.url(), other.url()]
        } else {
            [other.url(), bad.url()]
        };
        let sources = urls.iter().map(CheckpointSource::at).collect();
        let fetched = Fetch::step(Step(5), sources)
            .run(long(), &FetchOptions::default())
            .unwrap();
        assert_eq!((fetched.id.epoch, fetched.state), good());
        assert_eq!(
            *wrong.0.lock().unwrap(),
            1,
            "it was asked again for what it sent wrong"
        );
        assert!(other.sent() > 0, "the second source was not used");
    }
}

#[test]
fn a_chunk_that_was_wrong_once_is_not_asked_from_that_source_again() {
    let asked_for_3 = std::sync::Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let count = asked_for_3.clone();
    let snap = snapshot(5, 64, 3.0);
    let copy = snap.clone();
    let source = FakeSource::start(&snap, move |asked, _| {
        if asked.has(3) && count.fetch_add(1, std::sync::atomic::Ordering::SeqCst) == 0 {
            return Reply::Body(vec![0; honest(&copy, asked).len()]);
        }
        Reply::Honest
    });
    let e = fails(&source, &FetchOptions::default());
    assert_eq!(e.kind(), ErrorKind::Corrupt, "{e}");
    assert_eq!(asked_for_3.load(std::sync::atomic::Ordering::SeqCst), 1);
}

#[test]
fn a_chunk_that_is_wrong_everywhere_is_corrupt_and_names_source_and_chunk() {
    let (a, b) = (tampered(), tampered());
    let e = fetch(&[a.url(), b.url()], Step(5), long()).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::Corrupt);
    let text = e.to_string();
    assert!(
        text.contains("chunk 3 of") && text.contains(&a.address()) && text.contains(&b.address()),
        "{text}"
    );
}

#[test]
fn a_chunk_shorter_than_the_manifest_says_is_corrupt() {
    let snap = snapshot(5, 64, 3.0);
    let source = FakeSource::start(&snap, |asked, _| match asked {
        asked if asked.has(2) => Reply::Body(vec![1; 100]),
        _ => Reply::Honest,
    });
    let e = fails(&source, &FetchOptions::default());
    assert_eq!(e.kind(), ErrorKind::Corrupt);
    assert!(e.message().contains("100 bytes"), "{e}");
}

#[test]
fn an_answer_cut_in_the_middle_is_a_lost_peer() {
    let snap = snapshot(5, 64, 3.0);
    let cut = b"HTTP/1.1 200 OK\r\ncontent-length: 4096\r\n\r\nonly this".to_vec();
    let source = FakeSource::start(&snap, move |asked, _| match asked {
        asked if asked.has(2) => Reply::Raw(cut.clone()),
        _ => Reply::Honest,
    });
    let e = fails(&source, &FetchOptions::default());
    assert_eq!(e.kind(), ErrorKind::PeerLost);
    assert!(e.message().contains("after 9 bytes"), "{e}");
}

/// Serves the first chunks only.
fn dies_late(asked: &Asked, _: usize) -> Reply {
    if (10..99).any(|i| asked.has(i)) {
        Reply::Die
    } else {
        Reply::Honest
    }
}

#[test]
fn a_source_killed_in_the_middle_is_a_lost_peer_before_the_deadline() {
    let snap = snapshot(5, 64, 3.0);
    let source = FakeSource::start(&snap, dies_late);
    let e = fails(&source, &FetchOptions::default());
    assert_eq!(e.kind(), ErrorKind::PeerLost, "{e}");
    assert!(e.is_retryable());
    assert!(
        e.message().contains("step 5") && e.message().contains("chunks received"),
        "{e}"
    );
}

#[test]
fn a_source_killed_in_the_middle_is_replaced_by_another() {
    let snap = snapshot(5, 64, 3.0);
    let dies = FakeSource::start(&snap, dies_late);
    let lives = FakeSource::start(&snap, |_, _| Reply::Honest);
    assert_eq!(
        fetch(&[dies.url(), lives.url()], Step(5), long()).unwrap(),
        good()
    );
}

#[test]
fn l31_a_source_that_hangs_does_not_hold_up_the_download_from_another() {
    let snap = snapshot(5, 64, 3.0);
    let hangs = FakeSource::start(&snap, |asked, _| match asked {
        Asked::Manifest => Reply::Honest,
        Asked::Chunks(_) => Reply::Hang,
    });
    let lives = FakeSource::start(&snap, |_, _| Reply::Honest);
    // The hanging source would be given up only long after the deadline.
    let options = FetchOptions {
        stall_timeout: LONG * 2,
        ..FetchOptions::default()
    };
    assert_eq!(
        fetch_with(&[hangs.url(), lives.url()], Step(5), long(), &options).unwrap(),
        good()
    );
}

#[test]
fn a_source_that_hangs_alone_is_lost_after_the_stall_time_and_a_timeout_at_the_deadline() {
    let snap = snapshot(5, 64, 3.0);
    let source = FakeSource::start(&snap, |asked, _| match asked {
        asked if asked.has(1) => Reply::Hang,
        _ => Reply::Honest,
    });
    let options = FetchOptions {
        stall_timeout: Duration::from_millis(100),
        ..FetchOptions::default()
    };
    assert_eq!(fails(&source, &options).kind(), ErrorKind::PeerLost);
    let e = fetch(&[source.url()], Step(5), Instant::now() + Duration::from_secs(1)).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::Timeout);
    assert!(
        e.to_string().contains(&source.address()) && e.message().contains("chunks received"),
        "{e}"
    );
}

#[test]
fn a_manifest_beyond_the_limit_is_refused_whether_it_is_announced_or_endless() {
    let snap = snapshot(5, 64, 3.0);
    let announced = b"HTTP/1.1 200 OK\r\ncontent-length: 10995116277760\r\n\r\n{".to_vec();
    let source = FakeSource::start(&snap, move |_, _| Reply::Raw(announced.clone()));
    let e = fails(&source, &FetchOptions::default());
    assert_eq!(e.kind(), ErrorKind::Protocol, "{e}");
    assert!(e.message().contains("10995116277760"), "{e}");

    let source = FakeSource::start(&snap, |_, _| Reply::Endless);
    let options = FetchOptions {
        max_manifest_bytes: 1 << 20,
        ..FetchOptions::default()
    };
    let e = fails(&source, &options);
    assert_eq!(e.kind(), ErrorKind::Protocol, "{e}");
    assert!(e.message().contains("does not tell its length"), "{e}");
}

#[test]
fn an_endless_answer_is_refused_before_its_first_chunk() {
    let snap = snapshot(5, 64, 3.0);
    let source = FakeSource::start(&snap, |asked, _| match asked {
        Asked::Chunks(_) => Reply::Endless,
        Asked::Manifest => Reply::Honest,
    });
    let e = fails(&source, &FetchOptions::default());
    assert_eq!(e.kind(), ErrorKind::Protocol, "{e}");
}

#[test]
fn a_state_beyond_the_limit_is_refused_before_any_chunk_is_asked_for() {
    let snap = snapshot(5, 64, 3.0);
    let source = FakeSource::start(&snap, |_, _| Reply::Honest);
    let options = FetchOptions {
        max_state_bytes: 1000,
        ..FetchOptions::default()
    };
    let e = fails(&source, &options);
    assert_eq!(e.kind(), ErrorKind::Protocol);
    assert!(e.message().contains("max_state_bytes"), "{e}");
    assert_eq!(source.requests(), 1);
}

#[test]
fn l03_a_manifest_of_another_step_is_refused() {
    let source = FakeSource::start(&snapshot(6, 64, 3.0), |_, _| Reply::Honest);
    let e = fails(&source, &FetchOptions::default());
    assert_eq!(e.kind(), ErrorKind::Corrupt);
    assert!(e.message().contains("of step 6"), "{e}");
}

#[test]
fn a_manifest_that_fits_its_chunks_but_not_the_state_is_corrupt() {
    // All hashes are right; the bytes are not a state.
    let bytes = vec![7; 10_000];
    let json = Manifest::of(Step(5), Epoch(9), &bytes, 4096).to_json().unwrap();
    let source = FakeSource::start(&snapshot(5, 64, 3.0), move |asked, _| {
        Reply::Body(match asked {
            Asked::Manifest => json.clone(),
            Asked::Chunks(all) => all
                .iter()
                .flat_map(|i| bytes.chunks(4096).nth(*i).unwrap().to_vec())
                .collect(),
        })
    });
    let e = fails(&source, &FetchOptions::default());
    assert_eq!(e.kind(), ErrorKind::Corrupt, "{e}");
}

#[test]
fn a_server_that_does_not_speak_the_protocol_is_named() {
    let snap = snapshot(5, 64, 3.0);
    for raw in [
        "SSH-2.0-OpenSSH\r\n\r\n",
        "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi",
        "HTTP/1.1 500 no\r\n\r\n",
    ] {
        let source = FakeSource::start(&snap, move |_, _| Reply::Raw(raw.into()));
        let e = fails(&source, &FetchOptions::default());
        assert_eq!(e.kind(), ErrorKind::Protocol, "{raw}: {e}");
    }
}

#[test]
fn chunks_received_before_a_source_died_are_kept_when_the_next_one_shares_them() {
    let dies = FakeSource::start(&snapshot(5, 64, 3.0), dies_late);
    // Its manifest comes only when the first source is gone.
    let gate = {
        let dies = dies.address();
        move || {
            while std::net::TcpStream::connect(&dies).is_ok() {
                std::thread::yield_now();
            }
        }
    };
    let snap = snapshot(5, 64, 3.0);
    let total = snap.manifest().total_bytes() as usize;
    let next = FakeSource::start(&snap, move |asked, _| {
        if *asked == Asked::Manifest {
            gate();
        }
        Reply::Honest
    });
    assert_eq!(fetch(&[dies.url(), next.url()], Step(5), long()).unwrap(), good());
    assert!(next.sent() < total, "{} of {total} bytes", next.sent());
}

#[test]
fn a_peers_url_that_is_none_is_the_peers_fault_and_no_matter_if_another_source_helps() {
    for url in ["<n/a>", "", "ftp://a/b", "http://:0/x", "http://a b/"] {
        let e = fetch(&[url.into()], Step(5), long()).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Protocol, "{url}: {e}");
        assert!(e.to_string().contains(&format!("'{url}'")), "{e}");
    }
    // Only what the caller itself said is a wrong argument.
    for (sources, step) in [(vec![], 5), (vec!["http://a/b".into()], -1)] {
        let e = fetch(&sources, Step(step), long()).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::InvalidArgument);
    }
    let source = FakeSource::start(&snapshot(5, 64, 3.0), |_, _| Reply::Honest);
    assert_eq!(
        fetch(&["<n/a>".into(), source.url()], Step(5), long()).unwrap(),
        good()
    );
}

#[test]
fn a_source_that_cannot_be_found_is_named_and_holds_up_no_other() {
    let lost = || {
        CheckpointSource::found_by("replica 'r7'", |_| {
            Err(Error::new(ErrorKind::InvalidArgument, "rank not found"))
        })
    };
    let e = Fetch::step(Step(5), vec![lost()])
        .run(long(), &FetchOptions::default())
        .unwrap_err();
    assert_eq!(e.kind(), ErrorKind::Protocol, "{e}");
    assert!(
        e.message().contains("replica 'r7'") && e.message().contains("rank not found"),
        "{e}"
    );
    // One that is looked for until the deadline.
    let (held, release) = std::sync::mpsc::channel::<()>();
    let slow = CheckpointSource::found_by("replica 'r8'", move |_| {
        let _ = release.recv();
        Err(Error::new(ErrorKind::Unavailable, "gone"))
    });
    let source = FakeSource::start(&snapshot(5, 64, 3.0), |_, _| Reply::Honest);
    let sources = vec![lost(), slow, CheckpointSource::at(source.url())];
    let fetched = Fetch::step(Step(5), sources)
        .run(long(), &FetchOptions::default())
        .unwrap();
    assert_eq!(fetched.state, good().1);
    assert_eq!((fetched.followed.len(), fetched.received.len()), (1, 1));
    drop(held);
}

#[test]
fn a_connection_that_breaks_again_and_again_is_resumed_and_nothing_is_sent_twice_over() {
    let snap = snapshot(5, 512, 3.0);
    let total = snap.manifest().total_bytes() as usize;
    // Every answer breaks off in the middle of its second chunk.
    let source = FakeSource::start(&snap, |asked, _| match asked {
        Asked::Chunks(all) if all.len() > 1 => Reply::Cut(6000),
        _ => Reply::Honest,
    });
    let (_, got) = fetch(&[source.url()], Step(5), long()).unwrap();
    assert_eq!(got, state(512, 3.0));
    assert!(source.sent() < 2 * total, "{} of {total} bytes", source.sent());
}

#[test]
fn a_slow_source_brings_less_than_a_fast_one() {
    let snap = snapshot(5, 2048, 3.0);
    let slow = FakeSource::start(&snap, |asked, _| {
        if asked.is_chunks() {
            std::thread::sleep(Duration::from_millis(30));
        }
        Reply::Honest
    });
    let fast = FakeSource::start(&snap, |asked, _| {
        if asked.is_chunks() {
            std::thread::sleep(Duration::from_millis(1));
        }
        Reply::Honest
    });
    let sources = [slow.url(), fast.url()]
        .iter()
        .map(CheckpointSource::at)
        .collect();
    let fetched = Fetch::step(Step(5), sources)
        .run(long(), &FetchOptions::default())
        .unwrap();
    assert_eq!(fetched.state, state(2048, 3.0));
    assert_eq!(fetched.followed, [0, 1]);
    let of = |url: String| {
        fetched
            .received
            .iter()
            .find(|(n, _)| *n == url)
            .map_or(0, |r| r.1)
    };
    let (slow, fast) = (of(slow.url()), of(fast.url()));
    assert!(slow > 0 && fast > 2 * slow, "slow {slow}, fast {fast}");
}
