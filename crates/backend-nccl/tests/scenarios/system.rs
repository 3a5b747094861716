//! A system that has no more threads, sockets or files. The calls are refused by `fixtures/c/refuse.c`, which is preloaded: the nth call of a
//! function on a thread, once, so that what comes afterwards has to work; one scenario lowers the limit of files for real.

use std::sync::Arc;
use std::time::{Duration, Instant};

use backend_nccl::{CudaAccelerator, NcclGroup};
use ftcore::{
    Accelerator, Collective, Error, ErrorKind, GroupOptions, InMemoryStore, ProcessGroup, ProcessGroupExt,
    Store, SubmitOptions, deadline_in,
};
use libtest_mimic::Failed;
use rustix::process::{Resource, Rlimit, setrlimit};

use super::endings::until_logged;
use super::kit::*;
use super::set_up::log_lines;
use super::{ASYNC, HANG, Scenario, scenario};

const SOON: Duration = Duration::from_secs(20);
pub(super) const REFUSE: &str = "OXCCL_STANDIN_OS_FAIL";
pub(super) const PRELOAD: (&str, &str) = ("LD_PRELOAD", "@refuse");
const LOG: (&str, &str) = ("OXCCL_STANDIN_NCCL_LOG", "@log");

/// No thread of the backend's is left over, and every communicator that was made was ended.
pub(super) fn nothing_is_left() -> Outcome {
    let ours = || -> Result<Vec<String>, std::io::Error> {
        let mut names = Vec::new();
        for task in std::fs::read_dir("/proc/self/task")? {
            // A thread may end while it is looked at.
            let name = std::fs::read_to_string(task?.path().join("comm")).unwrap_or_default();
            if name.starts_with("ox-nccl") {
                names.push(name.trim().to_string());
            }
        }
        Ok(names)
    };
    let until = deadline_in(SOON);
    loop {
        let left = ours()?;
        let lines = log_lines()?;
        let count = |start: &str| lines.iter().filter(|l| l.starts_with(start)).count();
        let made = count("init ") + count("child of ");
        let ended = count("end abort") + count("end destroy");
        if left.is_empty() && made == ended {
            return Ok(());
        }
        check(Instant::now() < until, || {
            format!("threads {left:?}; {made} communicators were made, {ended} ended")
        })?;
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn alone(group: &NcclGroup, epoch: u64) -> Result<(), Error> {
    group.configure(by_itself(epoch, SOON))
}

/// A thread of a group of one does not start: `configure` says which, and the next one works.
fn one_fails(thread: &str) -> Outcome {
    let group = group(0, GroupOptions::default())?;
    let e = alone(&group, 1).err().ok_or("configure succeeded")?;
    says(
        &e,
        ErrorKind::Io,
        &[thread, "does not start", "ulimit -u", "configure"],
    )?;
    alone(&group, 2)?;
    submit(0, &group, SOON)?.wait_done()?;
    drop(group);
    nothing_is_left()
}

/// One configuration of this rank and a reduction over it: what went wrong.
pub(super) fn turn(
    rank: u32,
    group: &NcclGroup,
    c: ftcore::Configuration,
) -> Result<Option<Error>, libtest_mimic::Failed> {
    let began = Instant::now();
    let heard = match group.configure(c) {
        Err(e) => Some(e),
        // A rank that is connected hears of the other's failure, if there is one.
        Ok(()) => submit(rank, group, SOON)
            .and_then(|work| work.wait(deadline_in(SOON)))
            .err()
            .map(|e| group.error().unwrap_or(e)),
    };
    check(began.elapsed() < Duration::from_secs(10), || {
        format!("it took {:?}: {heard:?}", began.elapsed())
    })?;
    Ok(heard)
}

/// What two ranks that are refused something in their first configuration say; the second one works.
fn two_meet(limit: Duration, said: impl Fn(u32, Option<&Error>) -> Outcome + Sync) -> Outcome {
    let store: Arc<dyn Store> = Arc::new(InMemoryStore::new());
    ranks(2, |rank| {
        let group = group(rank, GroupOptions::default())?;
        store.barrier("both are made", 2, deadline_in(SOON))?;
        let heard = turn(rank, &group, configuration(&store, rank, 2, 1, limit))?;
        said(rank, heard.as_ref())?;
        store.barrier("both have failed", 2, deadline_in(SOON))?;
        next_epoch(rank, &group, &store)?;
        store.barrier("both go on", 2, deadline_in(SOON))?;
        Ok(())
    })?;
    nothing_is_left()
}

/// Rank `at` fails with these words, and the other one is told of them.
fn told(at: u32, kind: ErrorKind, words: &[&str]) -> Outcome {
    two_meet(SOON, |rank, heard| {
        let e = heard.ok_or("no rank failed")?;
        if rank == at {
            return says(e, kind, words);
        }
        let reports = format!("rank {at} reports");
        says(e, e.kind(), &[&reports])?;
        says(e, e.kind(), words)
    })
}

const THREAD: &[&str] = &["does not start", "ulimit -u"];

fn thread_of_zero() -> Outcome {
    told(0, ErrorKind::Io, THREAD)
}

fn thread_of_one() -> Outcome {
    told(1, ErrorKind::Io, THREAD)
}

fn port() -> Outcome {
    told(0, ErrorKind::Io, &["cannot listen"])
}

fn connections() -> Outcome {
    told(
        1,
        ErrorKind::Io,
        &["setting a control connection up", "ulimit -Hn"],
    )
}

/// Rank 1 gets no socket: only rank 0's deadline can tell it that no peer comes.
fn no_socket() -> Outcome {
    two_meet(Duration::from_millis(1200), |rank, heard| {
        let e = heard.ok_or("they met")?;
        match rank {
            0 => says(e, ErrorKind::Timeout, &["rank 1 of 2 did not come"]),
            _ => says(e, ErrorKind::Io, &["connecting to rank 0", "ulimit -Hn"]),
        }
    })
}

/// The one that was not let in finds the port closed.
fn no_guest() -> Outcome {
    two_meet(SOON, |rank, heard| {
        let e = heard.ok_or("they met")?;
        match rank {
            0 => says(e, ErrorKind::Io, &["cannot accept", "ulimit -Hn"]),
            _ => check(
                matches!(e.kind(), ErrorKind::PeerLost | ErrorKind::Io | ErrorKind::Backend),
                || format!("{e}"),
            ),
        }
    })
}

/// Something is refused once, somewhere: that costs one configuration at most, with an error of a kind that says where it comes from.
fn anything() -> Outcome {
    let store: Arc<dyn Store> = Arc::new(InMemoryStore::new());
    ranks(2, |rank| {
        let group = group(rank, GroupOptions::default())?;
        let mut lost = 0;
        for epoch in 1..=4u64 {
            store.barrier(&format!("before {epoch}"), 2, deadline_in(SOON))?;
            let c = configuration(&store, rank, 2, epoch, Duration::from_millis(1500));
            let heard = turn(rank, &group, c)?;
            if let Some(e) = &heard {
                let kinds = [
                    ErrorKind::Io,
                    ErrorKind::PeerLost,
                    ErrorKind::Timeout,
                    ErrorKind::Backend,
                ];
                check(kinds.contains(&e.kind()), || format!("{:?}: {e}", e.kind()))?;
            }
            let key = |rank: u32| format!("{epoch}: {rank} failed");
            store.set(&key(rank), &[u8::from(heard.is_some())], deadline_in(SOON))?;
            let other = store.get(&key(1 - rank), deadline_in(SOON))?;
            lost += u32::from(heard.is_some() || other == [1]);
            check(lost < 2, || format!("epoch {epoch} failed, too: {heard:?}"))?;
        }
        store.barrier("both are through", 2, deadline_in(SOON))?;
        Ok(())
    })?;
    nothing_is_left()
}

fn nobody_is_hurt() -> Outcome {
    two_meet(SOON, |_, heard| {
        heard.map_or(Ok(()), |e| Err(format!("it failed: {e}").into()))
    })
}

/// The limit of open files for real, the hard one: rank 0's port gets no socket.
fn no_files() -> Outcome {
    let store: Arc<dyn Store> = Arc::new(InMemoryStore::new());
    ranks(2, |rank| {
        let group = group(rank, GroupOptions::default())?;
        // Once, so that the stand-in has what it keeps open.
        group.configure(configuration(&store, rank, 2, 1, SOON))?;
        sum_works(rank, &group)?;
        store.barrier("both work", 2, deadline_in(SOON))?;
        let mut taken = Vec::new();
        if rank == 0 {
            let most = Some(256);
            setrlimit(
                Resource::Nofile,
                Rlimit {
                    current: most,
                    maximum: most,
                },
            )?;
            taken.extend(std::iter::from_fn(|| std::fs::File::open("/dev/null").ok()));
        }
        store.barrier("there are none left", 2, deadline_in(SOON))?;
        // A group of its own: what the old one has open would come free.
        let second = self::group(rank, GroupOptions::default())?;
        let e = second.configure(configuration(&store, rank, 2, 2, SOON)).err();
        let e = e.ok_or("configure succeeded")?;
        let kinds = [ErrorKind::Io, ErrorKind::Backend, ErrorKind::PeerLost];
        check(kinds.contains(&e.kind()), || format!("{:?}: {e}", e.kind()))?;
        store.barrier("both were refused", 2, deadline_in(SOON))?;
        drop(taken);
        store.barrier("there are some again", 2, deadline_in(SOON))?;
        second.configure(configuration(&store, rank, 2, 3, SOON))?;
        sum_works(rank, &second)?;
        sum_works(rank, &group)
    })
}

/// The thread that would abort does not start: the work ends after its deadline, and its memory counts as leaked until the next `configure`
/// has started that thread.
fn no_abort() -> Outcome {
    let leaked = ftcore::leaked_bytes();
    two(GroupOptions::default(), |rank, group, store| {
        let work = submit(rank, group, Duration::from_millis(400))?;
        let e = work.wait(deadline_in(SOON)).err().ok_or("it succeeded")?;
        says(&e, ErrorKind::Timeout, &["all_reduce"])?;
        check(work.recover().is_empty(), || {
            "memory came back that the library still had".into()
        })?;
        store.barrier("both have failed", 2, deadline_in(SOON))?;
        check(ftcore::leaked_bytes() >= leaked + 8000, || {
            "the memory was not counted".into()
        })?;
        store.barrier("both have counted", 2, deadline_in(SOON))?;
        next_epoch(rank, group, store)?;
        until_logged(&format!("end abort rank={rank}"))?;
        store.barrier("both go on", 2, deadline_in(SOON))?;
        Ok(())
    })?;
    let until = deadline_in(SOON);
    while ftcore::leaked_bytes() > leaked {
        check(Instant::now() < until, || "the memory was not freed".into())?;
        std::thread::sleep(Duration::from_millis(2));
    }
    nothing_is_left()
}

/// A communicator that failed is to be ended, and no thread starts for that: the next `configure` sees to it.
fn ended_later() -> Outcome {
    let group = group(0, GroupOptions::default())?;
    let e = alone(&group, 1).err().ok_or("configure succeeded")?;
    says(&e, ErrorKind::Backend, &["the communicator"])?;
    check(!log_lines()?.iter().any(|l| l.starts_with("end ")), || {
        "it was ended, so nothing was refused".into()
    })?;
    alone(&group, 2)?;
    until_logged("end abort rank=0")?;
    drop(group);
    nothing_is_left()
}

fn message(rank: u32, group: &NcclGroup) -> Result<(), Error> {
    let tensor = filled(rank, 1.0, 10)?;
    let op = match rank {
        0 => Collective::Send {
            tensor,
            peer: 1,
            tag: 0,
        },
        _ => Collective::Recv {
            tensor,
            peer: Some(0),
            tag: 0,
        },
    };
    let work = group.run(op, SubmitOptions::by(deadline_in(SOON)));
    work.map_err(|rejected| rejected.error)?.wait(deadline_in(SOON))
}

/// A group with work whose deadline is far: while it lives, the thread that keeps deadlines does, and no rank starts it.
fn with_a_clock() -> Result<NcclGroup, Failed> {
    let own = group(3, GroupOptions::default())?;
    own.configure(by_itself(1, SOON))?;
    submit(3, &own, TIME_LIMIT)?.wait_done()?;
    Ok(own)
}

/// Rank 0's channel has no thread.
fn no_channel() -> Outcome {
    let _clock = with_a_clock()?;
    two(GroupOptions::default(), |rank, group, store| {
        let e = message(rank, group).err().ok_or("the message arrived")?;
        says(&e, e.kind(), &["ox-nccl-to-1", "does not start"])?;
        let kind = [ErrorKind::Io, ErrorKind::Backend][rank as usize];
        says(&group_error(group)?, kind, &["ox-nccl-to-1", "ulimit -u"])?;
        next_epoch(rank, group, store)?;
        message(rank, group)?;
        store.barrier("both go on", 2, deadline_in(SOON))?;
        Ok(())
    })
}

fn no_split() -> Outcome {
    let _clock = with_a_clock()?;
    two(GroupOptions::default(), |rank, group, store| {
        let e = group.split(Some(1), rank, deadline_in(SOON)).err();
        let e = e.ok_or("the split succeeded")?;
        says(&e, e.kind(), &["ox-nccl-split", "does not start"])?;
        next_epoch(rank, group, store)?;
        store.barrier("both go on", 2, deadline_in(SOON))?;
        Ok(())
    })
}

/// Rank 0 of what is split off cannot listen: no rank gets a part, and the whole goes on.
fn no_port_for_a_part() -> Outcome {
    two(GroupOptions::default(), |rank, group, store| {
        let e = group.split(Some(1), rank, deadline_in(SOON)).err();
        let e = e.ok_or("the split succeeded")?;
        says(&e, e.kind(), &["cannot listen"])?;
        check((rank == 0) == (e.kind() == ErrorKind::Io), || format!("{e}"))?;
        sum_works(rank, group)?;
        store.barrier("both go on", 2, deadline_in(SOON))?;
        Ok(())
    })?;
    nothing_is_left()
}

fn no_synchronize() -> Outcome {
    let e = CudaAccelerator.synchronize(0, deadline_in(SOON)).err();
    says(
        &e.ok_or("it was waited for")?,
        ErrorKind::Io,
        &["ox-cuda-sync", "does not start"],
    )?;
    Ok(CudaAccelerator.synchronize(0, deadline_in(SOON))?)
}

/// What a rank calls while it is configured, refused at some call as by a connection that breaks there.
const SWEPT: [(&str, i32, u32); 2] = [("recv", 104, 4), ("send", 32, 3)];

pub(super) fn scenarios() -> Vec<Scenario> {
    let refused = |name, what, body| scenario(name, &[PRELOAD, LOG, (REFUSE, what)], body);
    let with = |name, what, more, body| scenario(name, &[PRELOAD, LOG, (REFUSE, what), more], body);
    let mut all = vec![
        refused(
            "system_without_a_thread_for_the_unique_id",
            "pthread_create:1:11",
            || one_fails("ox-nccl-id"),
        ),
        refused(
            "system_without_a_thread_for_the_communicator",
            "pthread_create:2:11",
            || one_fails("ox-nccl-init"),
        ),
        refused(
            "system_without_a_thread_for_the_watchdog",
            "pthread_create:3:11",
            || one_fails("ox-nccl-watch"),
        ),
        refused(
            "system_without_a_thread_for_the_engine",
            "pthread_create:4:11",
            || one_fails("ox-nccl-end"),
        ),
        refused(
            "system_without_a_thread_for_rank_0_s_id_is_told",
            "pthread_create/rank-0:1:11",
            thread_of_zero,
        ),
        refused(
            "system_without_a_thread_for_rank_0_s_communicator_is_told_at_once",
            "pthread_create/rank-0:2:11",
            thread_of_zero,
        ),
        refused(
            "system_without_a_thread_for_rank_0_s_connections_is_told",
            "pthread_create/rank-0:5:11",
            thread_of_zero,
        ),
        refused(
            "system_without_a_thread_for_rank_0_s_watchdog_is_told",
            "pthread_create/rank-0:3:11",
            thread_of_zero,
        ),
        refused(
            "system_without_a_thread_for_rank_0_s_engine_is_told",
            "pthread_create/rank-0:4:11",
            thread_of_zero,
        ),
        refused(
            "system_without_a_thread_for_rank_1_s_communicator_is_told_at_once",
            "pthread_create/rank-1:2:11",
            thread_of_one,
        ),
        refused(
            "system_without_a_thread_for_rank_1_s_connection_is_told",
            "pthread_create/rank-1:5:11",
            thread_of_one,
        ),
        refused(
            "system_without_a_thread_for_rank_1_s_watchdog_is_told",
            "pthread_create/rank-1:3:11",
            thread_of_one,
        ),
        refused(
            "system_without_a_socket_for_the_port",
            "socket/rank-0:1:24,socket/rank-0:2:24",
            port,
        ),
        refused(
            "system_without_a_socket_until_the_limit_is_raised_goes_on",
            "socket/rank-0:1:24",
            nobody_is_hurt,
        ),
        refused("system_that_does_not_bind", "bind/rank-0:1:98", port),
        // Only a port that other hosts reach has a route; it is asked for first.
        with(
            "system_without_a_socket_for_the_route_takes_this_host",
            "socket/rank-0:1:24",
            ("OXCCL_INSECURE", "1"),
            nobody_is_hurt,
        ),
        refused(
            "system_without_a_socket_for_rank_1",
            "socket/ox-meet:1:24,socket/ox-meet:2:24",
            no_socket,
        ),
        refused(
            "system_without_a_file_for_a_guest",
            "accept4/rank-0:1:24,accept4/rank-0:2:24",
            no_guest,
        ),
        refused(
            "system_whose_guests_went_away_goes_on",
            "accept4/rank-0:1:103",
            nobody_is_hurt,
        ),
        refused(
            "system_without_a_second_file_for_the_connection",
            // A debug build looks, with a call of its own, whether a file that it closes is open.
            "fcntl/rank-1:1:24,fcntl/rank-1:2:24,fcntl/rank-1:3:24",
            connections,
        ),
        scenario("system_with_no_files_left_and_then_some", &[], no_files),
        with(
            "system_without_a_thread_to_abort_on",
            "pthread_create/ox-clock:*:11,pthread_create/ox-nccl-notices:*:11",
            (HANG, "device:ncclAllReduce@0:1"),
            no_abort,
        ),
        with(
            "system_without_a_thread_to_end_a_failed_communicator_on",
            "pthread_create:3:11",
            (ASYNC, "ncclCommInitRankConfig@0:1:2"),
            ended_later,
        ),
        refused(
            "system_without_a_thread_for_a_channel",
            "pthread_create/rank-0:6:11",
            no_channel,
        ),
        refused(
            "system_without_a_thread_for_a_split",
            "pthread_create/rank-1:6:11",
            no_split,
        ),
        refused(
            "system_that_does_not_listen_for_a_part",
            "listen/rank-0:2:98",
            no_port_for_a_part,
        ),
        // The first is for rank 0's verdict.
        refused(
            "system_that_does_not_read_a_connection",
            "recv/rank-1:1:5",
            anything,
        ),
        refused(
            "system_without_a_thread_to_synchronise_on",
            "pthread_create:1:11",
            no_synchronize,
        ),
    ];
    for (function, code, most) in SWEPT {
        for (rank, nth) in (0..2).flat_map(|rank| (1..=most).map(move |nth| (rank, nth))) {
            let name = format!("system_refuses_rank_{rank}_call_{nth}_of_{function}");
            let what = format!("{function}/rank-{rank}:{nth}:{code}");
            // A scenario's words live as long as the program.
            all.push(refused(leaked(name), leaked(what), anything));
        }
    }
    all
}

fn leaked(text: String) -> &'static str {
    Box::leak(text.into_boxed_str())
}
