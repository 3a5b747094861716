//! Sockets of which a child that is forked off gets no copy.
//!
//! A socket ends for its peer when no process holds it any more. A child has copies of all, so a parent that is killed would not be seen to be gone
//! before its children are, too. What is held in [`Parents`] is noted in a table, and the first thing that a child does, in the handler of the fork,
//! is to put /dev/null in the place of each. The numbers stay taken: what the child does with its copy of the parent's objects meets no other file.
//!
//! The table is read without a lock, which another thread might hold at the fork. A fork in the moment in which a socket is made or closed may miss it.

use std::ffi::c_int;
use std::ops::{Deref, DerefMut};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::ptr;
use std::sync::atomic::{AtomicI32, AtomicPtr, Ordering};

/// A slot in which nothing is noted.
const FREE: RawFd = -1;
const SLOTS: usize = 64;

/// A part of the table. There are as many as were ever needed at once, and none is freed.
struct Block {
    slots: [AtomicI32; SLOTS],
    next: AtomicPtr<Self>,
}

static TABLE: Block = Block::new();

impl Block {
    const fn new() -> Self {
        Self {
            slots: [const { AtomicI32::new(FREE) }; SLOTS],
            next: AtomicPtr::new(ptr::null_mut()),
        }
    }

    fn next(&self) -> Option<&'static Self> {
        // SAFETY: it is null or what `append` leaked, of which there are only shared references.
        unsafe { self.next.load(Ordering::Acquire).as_ref() }
    }

    /// Sees to it that there is a next one. Of two threads the second leaks its own for nothing.
    fn append(&self) {
        let new = Box::leak(Box::new(Self::new()));
        let _ = self
            .next
            .compare_exchange(ptr::null_mut(), new, Ordering::AcqRel, Ordering::Relaxed);
    }
}

/// The numbers that are noted, and where.
fn noted() -> impl Iterator<Item = (&'static AtomicI32, RawFd)> {
    let blocks = std::iter::successors(Some(&TABLE), |block| block.next());
    blocks
        .flat_map(|block| &block.slots)
        .map(|slot| (slot, slot.load(Ordering::Relaxed)))
        .filter(|(_, number)| *number != FREE)
}

/// A number in the table.
#[derive(Debug)]
struct Note {
    slot: &'static AtomicI32,
    number: RawFd,
}

impl Note {
    fn new(number: RawFd) -> Self {
        let mut block = &TABLE;
        loop {
            let takes = |slot: &&AtomicI32| {
                slot.load(Ordering::Relaxed) == FREE
                    && slot
                        .compare_exchange(FREE, number, Ordering::Release, Ordering::Relaxed)
                        .is_ok()
            };
            if let Some(slot) = block.slots.iter().find(takes) {
                return Self { slot, number };
            }
            match block.next() {
                Some(next) => block = next,
                None => block.append(),
            }
        }
    }
}

impl Drop for Note {
    fn drop(&mut self) {
        // In a child the slot was emptied, and may be that of a socket of its own.
        let _ = self
            .slot
            .compare_exchange(self.number, FREE, Ordering::Release, Ordering::Relaxed);
    }
}

/// Something with a descriptor that is this process's alone: in a child that is forked off, /dev/null has its number. Give it no other descriptor.
#[derive(Debug)]
pub struct Parents<T: AsFd + 'static> {
    // Before what it is about: fields are dropped in this order. Once that is closed, the number may be another file's, which a child would lose.
    note: Note,
    of: T,
}

impl<T: AsFd + 'static> Parents<T> {
    /// From now on children get no copy. What was forked off before has one.
    pub fn new(of: T) -> Self {
        super::watch();
        Self {
            note: Note::new(of.as_fd().as_raw_fd()),
            of,
        }
    }

    /// Children get a copy again.
    pub fn into_inner(self) -> T {
        drop(self.note);
        self.of
    }
}

impl<T: AsFd + 'static> From<T> for Parents<T> {
    fn from(of: T) -> Self {
        Self::new(of)
    }
}

impl<T: AsFd + 'static> Deref for Parents<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.of
    }
}

impl<T: AsFd + 'static> DerefMut for Parents<T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.of
    }
}

impl<T: AsFd + 'static> AsFd for Parents<T> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.of.as_fd()
    }
}

/// In a child, before anything else: puts /dev/null in the place of all that is noted. Takes no lock and no memory.
///
/// # Safety
/// No other thread of this process may run, and none of its code have run but this: as in the handler of a fork.
pub(super) unsafe fn give_up() {
    // SAFETY: the name ends with a zero.
    let open = || unsafe { libc::open(c"/dev/null".as_ptr(), libc::O_RDWR | libc::O_CLOEXEC) };
    let mut null: c_int = open();
    let mut is_kept = false;
    for (slot, number) in noted() {
        // The child's copy of the note stays, and finds the slot as if it had been dropped.
        slot.store(FREE, Ordering::Relaxed);
        if null < 0 {
            // For want of a number, most likely: then it gets this one.
            // SAFETY: the number is this process's copy of a socket that the parent holds, and its owner here has not used it yet.
            unsafe { libc::close(number) };
            null = open();
            is_kept = null == number;
            if null < 0 || is_kept {
                continue;
            }
        }
        // SAFETY: as above; the number stays taken, as its owner expects.
        unsafe { libc::dup3(null, number, libc::O_CLOEXEC) };
    }
    if null >= 0 && !is_kept {
        // SAFETY: it was opened here, and no other code knows of it.
        unsafe { libc::close(null) };
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::{Read, Write};
    use std::os::fd::OwnedFd;
    use std::os::unix::net::UnixStream;
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::process::Command;
    use std::time::Duration;

    use super::*;

    /// Set in the process in which a test is alone.
    const ALONE: &str = "OXCCL_TEST_PARENTS";
    const SOON: Duration = Duration::from_secs(20);

    /// Plays a test in a process of its own: a fork beside other tests would give their files a longer life.
    fn alone(test: &str, body: impl FnOnce()) {
        if std::env::var_os(ALONE).is_some() {
            return body();
        }
        let output = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "--nocapture"])
            .arg(format!("forked::parents::tests::{test}"))
            .env(ALONE, "1")
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(
            output.status.success() && said.contains("1 passed"),
            "{said}{errors}"
        );
    }

    /// `of` at the first free number from `least` on.
    fn at(least: RawFd, of: impl AsFd) -> OwnedFd {
        rustix::io::fcntl_dupfd_cloexec(of, least).unwrap()
    }

    /// Which file stands behind a number; `None` if there is none.
    fn file_at(number: RawFd) -> Option<(u64, u64)> {
        // SAFETY: it is only looked at, and a number that is free is an error.
        let found = rustix::fs::fstat(unsafe { BorrowedFd::borrow_raw(number) });
        found.ok().map(|found| (found.st_dev, found.st_ino))
    }

    fn null() -> Option<(u64, u64)> {
        file_at(File::open("/dev/null").unwrap().as_raw_fd())
    }

    fn number_of(of: &impl AsFd) -> RawFd {
        of.as_fd().as_raw_fd()
    }

    fn pair() -> (UnixStream, UnixStream) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        theirs.set_read_timeout(Some(SOON)).unwrap();
        (ours, theirs)
    }

    /// A socket that is noted, and its other end.
    fn line() -> (Parents<UnixStream>, UnixStream) {
        let (ours, theirs) = pair();
        (ours.into(), theirs)
    }

    /// A process that was forked off here. It lives until it is asked.
    struct Child {
        number: libc::pid_t,
        asks: UnixStream,
    }

    impl Child {
        /// It finds out whether `holds`.
        fn fork(holds: impl FnOnce() -> bool) -> Self {
            Self::over(UnixStream::pair().unwrap(), holds)
        }

        fn over((asks, mut asked): (UnixStream, UnixStream), holds: impl FnOnce() -> bool) -> Self {
            // SAFETY: the other thread of this process, that of the harness, waits for this one; the allocator's state is consistent in the child,
            // which ends without any of the parent's handlers.
            let number = unsafe { libc::fork() };
            if number == 0 {
                // It ends with a parent that fails.
                drop(asks);
                let found = catch_unwind(AssertUnwindSafe(holds)).unwrap_or(false);
                let _ = asked.read(&mut [0]);
                // SAFETY: it ends here.
                unsafe { libc::_exit(i32::from(!found)) };
            }
            assert!(number > 0);
            Self { number, asks }
        }

        /// True if it found what it looked for. It lived until now.
        fn found(mut self) -> bool {
            self.asks.write_all(&[1]).unwrap();
            let mut status = 0;
            // SAFETY: `status` is ours.
            let ended = unsafe { libc::waitpid(self.number, &raw mut status, 0) };
            ended == self.number && status == 0
        }
    }

    #[test]
    fn a_socket_ends_with_its_parent_though_a_child_lives() {
        alone("a_socket_ends_with_its_parent_though_a_child_lives", || {
            let (ours, mut theirs) = line();
            let number = number_of(&ours);
            let child = Child::fork(|| file_at(number) == null());
            drop(ours);
            assert_eq!(theirs.read(&mut [0]).unwrap(), 0);
            assert!(child.found());
        });
    }

    #[test]
    fn a_number_that_was_noted_and_is_another_file_s_by_now_is_left_to_the_child() {
        alone(
            "a_number_that_was_noted_and_is_another_file_s_by_now_is_left_to_the_child",
            || {
                let (given_back, _theirs) = line();
                let given_back = given_back.into_inner();
                let status = File::open("/proc/self/status").unwrap();
                let (closed, _theirs) = line();
                let number = number_of(&closed);
                drop(closed);
                let other = at(number, status);
                assert_eq!(other.as_raw_fd(), number);
                let found = || [number_of(&given_back), number].map(file_at);
                let before = found();
                assert!(before.iter().all(Option::is_some));
                assert!(Child::fork(|| found() == before).found());
            },
        );
    }

    #[test]
    fn all_of_several_blocks_are_given_up_and_slots_are_used_again() {
        alone(
            "all_of_several_blocks_are_given_up_and_slots_are_used_again",
            || {
                let blocks = || std::iter::successors(Some(&TABLE), |block| block.next()).count();
                let some = || (0..2 * SLOTS + 1).map(|_| line().0).collect::<Vec<_>>();
                let all = some();
                assert_eq!(blocks(), 3);
                let numbers: Vec<RawFd> = all.iter().map(number_of).collect();
                let child = Child::fork(|| {
                    let null = null();
                    let given_up = numbers.iter().all(|number| file_at(*number) == null);
                    // A socket of the child's own is noted until it is closed, whatever becomes of the copies.
                    let (own, _theirs) = line();
                    drop(all);
                    let noted_now = || noted().map(|(_, number)| number).collect::<Vec<_>>();
                    let is_noted = noted_now() == [number_of(&own)];
                    drop(own);
                    given_up && is_noted && noted_now().is_empty()
                });
                assert!(child.found());
                drop(some());
                assert_eq!(blocks(), 3);
            },
        );
    }

    #[test]
    fn a_process_that_can_open_no_more_gives_up_its_sockets_all_the_same() {
        alone(
            "a_process_that_can_open_no_more_gives_up_its_sockets_all_the_same",
            || {
                let lines: [_; 3] = std::array::from_fn(|_| line());
                let numbers = [0, 1, 2].map(|n| number_of(&lines[n].0));
                let (null, ways) = (null(), UnixStream::pair().unwrap());
                let file = File::open("/proc/self/status").unwrap();
                let mut limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
                limit.current = Some(64);
                rustix::process::setrlimit(rustix::process::Resource::Nofile, limit).unwrap();
                let full: Vec<_> = std::iter::from_fn(|| file.try_clone().ok()).collect();
                assert!(number_of(&full[full.len() - 1]) == 63);
                let child = Child::over(ways, || numbers.iter().all(|number| file_at(*number) == null));
                for (ours, mut theirs) in lines {
                    drop(ours);
                    assert_eq!(theirs.read(&mut [0]).unwrap(), 0);
                }
                assert!(child.found());
            },
        );
    }
}
