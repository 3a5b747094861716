//! The steps of the formats that are written for each instruction set.

use super::hadamard::{GROUP, Signs};

/// Steps that exist once per instruction set. All give the same bits.
pub(super) trait Isa {
    /// The peaks of `blocks`, as many as `peaks` has room for; the highest of them.
    fn peaks<const B: usize>(blocks: &[[f32; B]], peaks: &mut [u32]) -> u32;
    /// Rotates a group, for [`Rotated`](super::rotated): `to = H · (sign · from / 128)` and the peaks of its
    /// halves; false if a value is too large for that.
    fn rotate(signs: &Signs, from: &[f32; GROUP], to: &mut [f32; GROUP], peaks: &mut [u32; 2]) -> bool;
    /// The inverse, up to rounding.
    fn rotate_back(signs: &Signs, from: &[f32; GROUP], to: &mut [f32; GROUP]);
    /// The packed 4-bit codes of a block of finite values, to nearest even; `inverse` is that of the scale which its peak makes.
    fn nibbles(block: &[f32; 64], inverse: f32, codes: &mut [u8; 32]);
}
