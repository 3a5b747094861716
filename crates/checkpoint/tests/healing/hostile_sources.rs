//! Given sources that lie, break, hang or die: a fetch ends with the right state or a typed error, in time.

use std::time::{Duration, Instant};

use checkpoint::{FetchOptions, Manifest, StateDict, fetch, fetch_with};
use ftcore::{Error, ErrorKind};

use crate::fake_source::{Asked, FakeSource, Reply, honest, snapshot, state};

/// Far beyond what any of these tests takes when it passes.
const LONG: Duration = Duration::from_secs(120);

fn long() -> Instant {
    Instant::now() + LONG
}

fn fails(source: &FakeSource, options: &FetchOptions) -> Error {
    let deadline = long();
    let e = fetch_with(&[source.url()], 5, deadline, options).unwrap_err();
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

fn good() -> (i64, StateDict) {
    (9, state(64, 3.0))
}

/// Of a source whose chunk 3 has one bit flipped, as long as `when(request number)`.
fn tampered(when: impl Fn(usize) -> bool + Send + Sync + 'static) -> FakeSource {
    let snap = snapshot(5, 64, 3.0);
    let copy = snap.clone();
    FakeSource::start(&snap, move |asked, n| {
        if asked != Asked::Chunk(3) || !when(n) {
            return Reply::Honest;
        }
        let mut body = honest(&copy, asked);
        body[100] ^= 1;
        Reply::Body(body)
    })
}

#[test]
fn a_tampered_chunk_is_refused_and_fetched_from_the_second_source() {
    let bad = tampered(|_| true);
    let snap = snapshot(5, 64, 3.0);
    let other = FakeSource::start(&snap, |_, _| Reply::Honest);
    assert_eq!(fetch(&[bad.url(), other.url()], 5, long()).unwrap(), good());
    assert_eq!(fetch(&[other.url(), bad.url()], 5, long()).unwrap(), good());
    assert!(other.requests() > 2, "the second source was not used");
}

#[test]
fn a_chunk_that_is_wrong_once_is_fetched_from_the_same_source_again() {
    let hits = std::sync::atomic::AtomicUsize::new(0);
    let source = tampered(move |_| hits.fetch_add(1, std::sync::atomic::Ordering::SeqCst) == 0);
    assert_eq!(fetch(&[source.url()], 5, long()).unwrap(), good());
}

#[test]
fn a_chunk_that_is_wrong_everywhere_is_corrupt_and_names_source_and_chunk() {
    let (a, b) = (tampered(|_| true), tampered(|_| true));
    let e = fetch(&[a.url(), b.url()], 5, long()).unwrap_err();
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
        Asked::Chunk(2) => Reply::Body(vec![1; 100]),
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
        Asked::Chunk(2) => Reply::Raw(cut.clone()),
        _ => Reply::Honest,
    });
    let e = fails(&source, &FetchOptions::default());
    assert_eq!(e.kind(), ErrorKind::PeerLost);
    assert!(e.message().contains("chunk/2 after 9 bytes"), "{e}");
}

#[test]
fn a_source_killed_in_the_middle_is_a_lost_peer_before_the_deadline() {
    let snap = snapshot(5, 64, 3.0);
    let source = FakeSource::start(&snap, |_, n| if n < 6 { Reply::Honest } else { Reply::Die });
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
    let dies = FakeSource::start(&snap, |_, n| if n < 6 { Reply::Honest } else { Reply::Die });
    let lives = FakeSource::start(&snap, |_, _| Reply::Honest);
    assert_eq!(fetch(&[dies.url(), lives.url()], 5, long()).unwrap(), good());
}

#[test]
fn l31_a_source_that_hangs_does_not_hold_up_the_download_from_another() {
    let snap = snapshot(5, 64, 3.0);
    let hangs = FakeSource::start(&snap, |asked, _| match asked {
        Asked::Manifest => Reply::Honest,
        Asked::Chunk(_) => Reply::Hang,
    });
    let lives = FakeSource::start(&snap, |_, _| Reply::Honest);
    // The hanging source would be given up only long after the deadline.
    let options = FetchOptions {
        stall_timeout: LONG * 2,
        ..FetchOptions::default()
    };
    assert_eq!(
        fetch_with(&[hangs.url(), lives.url()], 5, long(), &options).unwrap(),
        good()
    );
}

#[test]
fn a_source_that_hangs_alone_is_lost_after_the_stall_time_and_a_timeout_at_the_deadline() {
    let snap = snapshot(5, 64, 3.0);
    let source = FakeSource::start(&snap, |asked, _| match asked {
        Asked::Chunk(1) => Reply::Hang,
        _ => Reply::Honest,
    });
    let options = FetchOptions {
        stall_timeout: Duration::from_millis(100),
        ..FetchOptions::default()
    };
    assert_eq!(fails(&source, &options).kind(), ErrorKind::PeerLost);
    let e = fetch(&[source.url()], 5, Instant::now() + Duration::from_secs(1)).unwrap_err();
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
    assert!(e.message().contains("1048576 are allowed"), "{e}");
}

#[test]
fn an_endless_chunk_is_refused() {
    let snap = snapshot(5, 64, 3.0);
    let source = FakeSource::start(&snap, |asked, _| match asked {
        Asked::Chunk(_) => Reply::Endless,
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
    let json = Manifest::of(5, 9, &bytes, 4096).to_json().unwrap();
    let source = FakeSource::start(&snapshot(5, 64, 3.0), move |asked, _| {
        Reply::Body(match asked {
            Asked::Manifest => json.clone(),
            Asked::Chunk(i) => bytes.chunks(4096).nth(i).unwrap().to_vec(),
        })
    });
    let e = fails(&source, &FetchOptions::default());
    assert_eq!(e.kind(), ErrorKind::Corrupt, "{e}");
    // An honest source beside it heals all the same.
    let other = FakeSource::start(&snapshot(5, 64, 3.0), |_, _| Reply::Honest);
    assert_eq!(fetch(&[source.url(), other.url()], 5, long()).unwrap(), good());
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
fn sources_with_different_states_are_never_mixed() {
    // The first has the same chunks at the beginning and dies there.
    let dies = FakeSource::start(&snapshot(5, 64, 2.0), |asked, _| match asked {
        Asked::Chunk(i) if i > 4 => Reply::Die,
        _ => Reply::Honest,
    });
    let lives = FakeSource::start(&snapshot(5, 64, 3.0), |_, _| Reply::Honest);
    for _ in 0..3 {
        assert_eq!(fetch(&[dies.url(), lives.url()], 5, long()).unwrap(), good());
    }
    // Two live ones: either state, whole.
    let other = FakeSource::start(&snapshot(5, 64, 2.0), |_, _| Reply::Honest);
    let (_, got) = fetch(&[lives.url(), other.url()], 5, long()).unwrap();
    assert!(got == state(64, 3.0) || got == state(64, 2.0));
}

#[test]
fn chunks_received_before_a_source_died_are_kept_when_the_next_one_shares_them() {
    let dies = FakeSource::start(&snapshot(5, 64, 3.0), |asked, _| match asked {
        Asked::Chunk(i) if i >= 10 => Reply::Die,
        _ => Reply::Honest,
    });
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
    let total = snap.manifest().chunk_count();
    let next = FakeSource::start(&snap, move |asked, _| {
        if asked == Asked::Manifest {
            gate();
        }
        Reply::Honest
    });
    assert_eq!(fetch(&[dies.url(), next.url()], 5, long()).unwrap(), good());
    assert!(
        next.requests() < total,
        "{} requests for {total} chunks",
        next.requests()
    );
}

#[test]
fn urls_that_are_no_urls_are_errors_unless_another_source_helps() {
    let e = fetch(&["<n/a>".into()], 5, long()).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::InvalidArgument);
    assert_eq!(
        fetch(&[], 5, long()).unwrap_err().kind(),
        ErrorKind::InvalidArgument
    );
    let source = FakeSource::start(&snapshot(5, 64, 3.0), |_, _| Reply::Honest);
    assert_eq!(fetch(&["<n/a>".into(), source.url()], 5, long()).unwrap(), good());
}
