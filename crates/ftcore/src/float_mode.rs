//! The processor's mode for floats, which belongs to a thread: flushing of numbers below the normal ones, rounding, traps.
//!
//! What computes for a job runs on whichever thread drives, and a program may have set the mode of some of its threads and not of others
//! (`torch.set_flush_denormal`, a library built with fast math). The same sum would then differ between ranks. So for as long
//! as a kernel runs its thread has the default mode, which is also the one that the compiler takes for granted.

use std::marker::PhantomData;

/// The default mode on this thread, until it is dropped: then the thread has the mode again that it had.
///
/// What computes in it stands in a function of its own that is not inlined. The compiler knows nothing of modes: it would be free to compute
/// before the one change of the mode or after the other.
///
/// ```
/// use ftcore::float_mode::DefaultMode;
///
/// fn add(into: &mut [f32], from: &[f32]) {
///     let _mode = DefaultMode::set();
///     add_here(into, from);
/// }
///
/// /// In the thread's own mode. Not inlined, so that nothing of it can move out from between the two changes of the mode.
/// #[inline(never)]
/// fn add_here(into: &mut [f32], from: &[f32]) {
///     into.iter_mut().zip(from).for_each(|(a, b)| *a += b);
/// }
/// # let mut sums = [1.0];
/// # add(&mut sums, &[2.0]);
/// # assert_eq!(sums, [3.0]);
/// ```
#[derive(Debug)]
#[must_use = "the mode is the thread's own again once this is dropped"]
pub struct DefaultMode {
    /// What the thread had, if it was something else.
    before: Option<Word>,
    /// It stays on its thread.
    _thread: PhantomData<*const ()>,
}

impl DefaultMode {
    /// On a thread that has that mode, as nearly all have, nothing is written.
    #[inline]
    pub fn set() -> Self {
        let word = read();
        let differs = word & CONTROL != DEFAULT;
        if differs {
            write((word & !CONTROL) | DEFAULT);
        }
        Self {
            before: differs.then_some(word),
            _thread: PhantomData,
        }
    }
}

impl Drop for DefaultMode {
    #[inline]
    fn drop(&mut self) {
        if let Some(word) = self.before {
            write(word);
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod register {
    use std::arch::asm;

    pub(super) type Word = u32;
    /// The bits of MXCSR that say how to compute: all but those that tell what has happened (0 to 5), and those that are not of every processor.
    pub(super) const CONTROL: Word = 0xFFC0;
    /// All traps off, round to nearest, flush nothing.
    pub(super) const DEFAULT: Word = 0x1F80;

    #[inline]
    pub(super) fn read() -> Word {
        let mut word = 0;
        // SAFETY: every processor of x86-64 has the instruction, and it writes the four bytes that `word` has.
        unsafe { asm!("stmxcsr [{}]", in(reg) &raw mut word, options(nostack, preserves_flags)) };
        word
    }

    #[inline]
    pub(super) fn write(word: Word) {
        // SAFETY: every processor of x86-64 has the instruction, and it reads the four bytes that `word` has. They are the default mode in bits
        // that were read from there, or all of what was read: no reserved bit is set. The compiler knows one mode only, the default: from here to
        // the next write the thread has it, or what the thread's owner had chosen before this crate was called.
        unsafe { asm!("ldmxcsr [{}]", in(reg) &raw const word, options(nostack, preserves_flags)) };
    }
}

#[cfg(target_arch = "aarch64")]
mod register {
    use std::arch::asm;

    pub(super) type Word = u64;
    /// FPCR has nothing but how to compute: what has happened is in FPSR.
    pub(super) const CONTROL: Word = Word::MAX;
    /// All traps off, round to nearest, flush nothing, NaNs as they come.
    pub(super) const DEFAULT: Word = 0;

    #[inline]
    pub(super) fn read() -> Word {
        let word;
        // SAFETY: every processor of aarch64 has the register, and reading it changes nothing.
        unsafe { asm!("mrs {}, fpcr", out(reg) word, options(nostack, preserves_flags)) };
        word
    }

    #[inline]
    pub(super) fn write(word: Word) {
        // SAFETY: every processor of aarch64 has the register, and the word is 0, its default, or was read from there. The compiler knows one
        // mode only, the default: from here to the next write the thread has it, or what its owner had chosen before this crate was called.
        unsafe { asm!("msr fpcr, {}", in(reg) word, options(nostack, preserves_flags)) };
    }
}

/// Other processors keep what they have.
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
mod register {
    pub(super) type Word = u32;
    pub(super) const CONTROL: Word = 0;
    pub(super) const DEFAULT: Word = 0;

    #[inline]
    pub(super) fn read() -> Word {
        0
    }

    #[inline]
    pub(super) fn write(_: Word) {}
}

use register::{CONTROL, DEFAULT, Word, read, write};

/// What programs may have set, for the tests of kernels here and in other crates: flushing, and rounding toward zero besides.
#[doc(hidden)]
pub mod foreign {
    use super::{CONTROL, DEFAULT, DefaultMode, Word, read, write};

    #[cfg(target_arch = "x86_64")]
    const FLUSH: Word = 0x8040;
    #[cfg(target_arch = "x86_64")]
    const TOWARD_ZERO: Word = 0x6000;
    #[cfg(target_arch = "aarch64")]
    const FLUSH: Word = 1 << 24;
    #[cfg(target_arch = "aarch64")]
    const TOWARD_ZERO: Word = 3 << 22;
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    const FLUSH: Word = 0;
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    const TOWARD_ZERO: Word = 0;

    /// As bits of the register; 0 on other processors.
    pub const MODES: [Word; 2] = [FLUSH, FLUSH | TOWARD_ZERO];

    /// Sees that the thread still has `mode` after `body`, and gives it the default back.
    pub fn with<T>(mode: Word, body: impl FnOnce() -> T) -> T {
        let usual = DefaultMode::set();
        let before = read();
        write(before | mode);
        let result = body();
        let after = read();
        write(before);
        drop(usual);
        assert_eq!(
            after & CONTROL,
            DEFAULT | mode,
            "the mode of the thread has changed"
        );
        result
    }
}
