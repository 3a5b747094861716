//! Ranks with credentials: who is met over which transport, what the others get, and that strangers at the port change nothing.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use backend_gloo::GlooGroup;
use ftcore::identity::hello::{Handshake, Reason, Refused, Topic};
use ftcore::{
    Credentials, DType, Epoch, ErrorKind, GroupOptions, ProcessGroup, ProcessGroupExt, ReduceOp, Store,
    Tensor, deadline_in,
};

use crate::ranks::{configuration, soon, store};

/// The folder of a job's credentials.
fn folder(job: &str, digit: char) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("credentials-{job}-{digit}"));
    // Tests beside each other write the same.
    std::fs::create_dir_all(&folder).unwrap();
    let write = |name: &str, text: &str| {
        let path = folder.join(name);
        let new = folder.join(format!("{name}.{:?}", std::thread::current().id()));
        std::fs::write(&new, text).unwrap();
        std::fs::set_permissions(&new, std::fs::Permissions::from_mode(0o600)).unwrap();
        std::fs::rename(new, path).unwrap();
    };
    write("job", job);
    write("secret", &digit.to_string().repeat(64));
    folder
}

pub(crate) fn job() -> PathBuf {
    folder("job-7", '1')
}

fn group_with(transport: &str, credentials: Option<&Path>) -> GlooGroup {
    let mut options = GroupOptions::default();
    if let Some(folder) = credentials {
        let folder = folder.to_str().unwrap().to_string();
        options.hints.insert("credentials".into(), folder);
    }
    if transport == "mixed" {
        return GlooGroup::mixed("test", options).unwrap();
    }
    let (transport, connections) = transport.split_once('*').unwrap_or((transport, "1"));
    options.hints.insert("transport".into(), transport.into());
    options.hints.insert("connections".into(), connections.into());
    GlooGroup::new("test", options).unwrap()
}

fn sums(group: &GlooGroup) {
    let tensor = Tensor::zeros(DType::F32, 100_000);
    let work = group.all_reduce(tensor, ReduceOp::Sum).unwrap();
    work.wait(soon()).unwrap();
}

#[test]
fn ranks_of_one_job_meet_over_every_transport() {
    let folder = job();
    for transport in ["tcp", "tcp*4", "shm", "mixed", "auto"] {
        let store = store();
        std::thread::scope(|scope| {
            for rank in 0..3u32 {
                let (store, folder) = (&store, &folder);
                scope.spawn(move || {
                    let group = group_with(transport, Some(folder));
                    for epoch in 1..3 {
                        group.configure(configuration(store, epoch, rank, 3)).unwrap();
                        sums(&group);
                    }
                });
            }
        });
    }
}

#[test]
fn ranks_that_do_not_trust_each_other_do_not_meet_and_say_which_side_lacks_what() {
    let (ours, other_secret, other_job) = (job(), folder("job-7", '2'), folder("job-8", '1'));
    let cases = [
        (
            Some(&ours),
            None,
            "asks for a job's credentials and this process has none",
        ),
        (None, Some(&ours), "it has no credentials"),
        (
            Some(&ours),
            Some(&other_secret),
            "does not hold the secret of job job-7",
        ),
        (
            Some(&ours),
            Some(&other_job),
            "does not hold the secret of job job-8",
        ),
    ];
    std::thread::scope(|scope| {
        for (transport, (first, second, says)) in ["tcp", "auto"]
            .into_iter()
            .flat_map(|t| cases.iter().map(move |case| (t, *case)))
        {
            let store = store();
            let of_first = store.clone();
            scope.spawn(move || {
                let mut c = configuration(&of_first, 1, 0, 2);
                c.deadline = deadline_in(Duration::from_secs(3));
                let group = group_with(transport, first.map(PathBuf::as_path));
                let e = group.configure(c).unwrap_err();
                // A stranger's failure is not its own: it waits for rank 1, and says whom it turned away.
                assert_eq!(e.kind(), ErrorKind::Timeout, "{e}");
                assert!(e.to_string().contains("turned away"), "{e}");
            });
            scope.spawn(move || {
                let e = group_with(transport, second.map(PathBuf::as_path))
                    .configure(configuration(&store, 1, 1, 2))
                    .unwrap_err();
                assert_eq!(e.kind(), ErrorKind::Protocol, "{transport}: {e}");
                assert_eq!(e.context().peer, Some(0), "{e}");
                assert!(e.to_string().contains(says), "{transport}: {e}");
            });
        }
    });
}

fn dial(address: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    stream
}

/// What comes until the connection ends, which it must.
fn all_of(mut stream: TcpStream) -> Vec<u8> {
    let mut rest = Vec::new();
    match stream.read_to_end(&mut rest) {
        Ok(_) => {}
        Err(e) => assert_eq!(e.kind(), std::io::ErrorKind::ConnectionReset, "{e}"),
    }
    rest
}

/// The hello on a blocking stream: what the caller said, and how it ended.
fn say_hello(stream: &mut TcpStream, folder: &Path, topic: Topic) -> (Vec<u8>, std::io::Result<bool>) {
    struct Recorded<'a>(&'a mut TcpStream, Vec<u8>);
    impl Read for Recorded<'_> {
        fn read(&mut self, into: &mut [u8]) -> std::io::Result<usize> {
            self.0.read(into)
        }
    }
    impl Write for Recorded<'_> {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            let n = self.0.write(bytes)?;
            self.1.extend(&bytes[..n]);
            Ok(n)
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    let mut hello = Handshake::call(Credentials::load(folder).unwrap(), topic).unwrap();
    let mut recorded = Recorded(stream, Vec::new());
    let done = hello.advance(&mut recorded);
    (recorded.1, done)
}

fn reason(done: std::io::Result<bool>) -> Option<Reason> {
    Refused::of(&done.unwrap_err()).map(Refused::reason)
}

#[test]
fn strangers_at_the_port_of_a_rank_with_credentials_change_nothing() {
    ftcore::raise_descriptor_limit();
    let (folder, store) = (job(), store());
    std::thread::scope(|scope| {
        let first = scope.spawn(|| {
            let group = group_with("tcp", Some(&folder));
            group.configure(configuration(&store, 1, 0, 2)).unwrap();
            sums(&group);
        });
        // Rank 0 waits for rank 1. Strangers come first. (What one says that knows gloo's own greeting is in `bad_peer`.)
        let (address, _) = card(store.as_ref());
        let ours = |from, to, epoch| Topic::new("gloo", Epoch(epoch), from, to);

        // Without a hello: they are told why, and no more.
        let mut stream = dial(address);
        stream.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
        let told = all_of(stream);
        let refused = Refused::seen_without_credentials(&told);
        assert!(told.is_empty() || refused.is_some(), "{told:?}");
        // Another secret, another job, another epoch, another rank, another service.
        for (folder, topic, expected) in [
            (
                crate::credentials::folder("job-7", '2'),
                ours(1, 0, 1),
                Reason::WrongProof,
            ),
            (
                crate::credentials::folder("job-8", '1'),
                ours(1, 0, 1),
                Reason::WrongProof,
            ),
            (job(), ours(1, 0, 2), Reason::OtherTopic),
            (job(), ours(1, 7, 1), Reason::OtherTopic),
            (job(), Topic::new("store", Epoch(1), 1, 0), Reason::OtherTopic),
        ] {
            let mut stream = dial(address);
            let (_, done) = say_hello(&mut stream, &folder, topic);
            assert_eq!(reason(done), Some(expected));
            assert!(all_of(stream).is_empty());
        }
        // What was recorded of a rank of the job.
        let mut stream = dial(address);
        let (recorded, done) = say_hello(&mut stream, &job(), ours(1, 0, 1));
        assert!(done.unwrap());
        let mut replay = dial(address);
        replay.write_all(&recorded).unwrap();
        replay.write_all(&[7; 68]).unwrap();
        assert!(
            all_of(replay).len() <= 80 + 16,
            "an answer and a refusal at the most"
        );
        // Slow ones, and a flood of half hellos: more than there is room for, so that the oldest are closed.
        let mut slow = dial(address);
        let mut half = Vec::new();
        for i in 0..400usize {
            let mut stream = dial(address);
            stream.write_all(&recorded[..i % 79]).unwrap();
            half.push(stream);
            let _ = slow.write_all(&recorded[i % 79..][..1]);
        }
        assert!(all_of(half.remove(0)).is_empty());
        // Now rank 1.
        let group = group_with("tcp", Some(&folder));
        group.configure(configuration(&store, 1, 1, 2)).unwrap();
        sums(&group);
        first.join().unwrap();
        drop((half, stream));
    });
}

#[test]
fn silent_strangers_at_a_port_without_credentials_keep_no_rank_out() {
    ftcore::raise_descriptor_limit();
    let store = store();
    std::thread::scope(|scope| {
        let first = scope.spawn(|| {
            let group = group_with("tcp", None);
            group.configure(configuration(&store, 1, 0, 2)).unwrap();
            sums(&group);
        });
        let (address, _) = card(store.as_ref());
        let began = Instant::now();
        let silent: Vec<_> = (0..400).map(|_| dial(address)).collect();
        // A newcomer does not wait for the five seconds of those that are there.
        let group = group_with("tcp", None);
        group.configure(configuration(&store, 1, 1, 2)).unwrap();
        assert!(
            began.elapsed() < Duration::from_millis(4800),
            "{:?}",
            began.elapsed()
        );
        sums(&group);
        first.join().unwrap();
        drop(silent);
    });
}

/// Where rank 0 listens, and the number that it published.
pub(crate) fn card(store: &dyn Store) -> (SocketAddr, u64) {
    let card = store.get("test/1/gloo/0", soon()).unwrap();
    let card = String::from_utf8(card).unwrap();
    let fields: Vec<&str> = card.split(' ').collect();
    let port = fields[3].parse::<SocketAddr>().unwrap().port();
    let nonce = u64::from_str_radix(fields[1], 16).unwrap();
    (SocketAddr::from(([127, 0, 0, 1], port)), nonce)
}

/// What the hello costs a configuration: run with `--ignored --nocapture`.
#[test]
#[ignore = "measures: prints the time of a configuration with and without credentials"]
fn the_hello_costs_one_round_trip() {
    let folder = job();
    for (world, transport) in [(2u32, "tcp"), (8, "tcp"), (2, "auto"), (8, "auto")] {
        let mut times = [Vec::new(), Vec::new()];
        for round in 0..41u64 {
            for (with, times) in times.iter_mut().enumerate() {
                let store = store();
                let barrier = Arc::new(std::sync::Barrier::new(world as usize));
                let took: Vec<Duration> = std::thread::scope(|scope| {
                    let ranks: Vec<_> = (0..world)
                        .map(|rank| {
                            let (store, folder, barrier) = (&store, &folder, barrier.clone());
                            scope.spawn(move || {
                                let folder = (with == 1).then_some(folder.as_path());
                                let group = group_with(transport, folder);
                                barrier.wait();
                                let began = Instant::now();
                                group.configure(configuration(store, 1, rank, world)).unwrap();
                                let took = began.elapsed();
                                barrier.wait();
                                took
                            })
                        })
                        .collect();
                    ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
                });
                if round > 0 {
                    times.extend(took.into_iter().max());
                }
            }
        }
        let [without, with] = times.map(|mut all| {
            all.sort();
            all[all.len() / 2]
        });
        println!(
            "configure, {world} ranks over {transport}: {without:.1?} without, {with:.1?} with credentials (medians)"
        );
    }
}
