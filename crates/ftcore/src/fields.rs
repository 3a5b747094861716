//! Fields of fixed size, one after the other, as hellos, frames and fingerprints have them. Numbers are little-endian.
//!
//! Inlined in the crates that use it: frames are made and read on the path of every operation.

/// Writes from the front of a slice; what has no room is left out.
pub struct Put<'a>(pub &'a mut [u8]);

impl Put<'_> {
    /// These bytes.
    #[inline]
    pub fn bytes(&mut self, bytes: &[u8]) {
        let n = bytes.len().min(self.0.len());
        let (to, rest) = std::mem::take(&mut self.0).split_at_mut(n);
        to.iter_mut().zip(bytes).for_each(|(to, from)| *to = *from);
        self.0 = rest;
    }

    /// A number of 4 bytes.
    #[inline]
    pub fn u32(&mut self, number: u32) {
        self.bytes(&number.to_le_bytes());
    }

    /// A number of 8 bytes.
    #[inline]
    pub fn u64(&mut self, number: u64) {
        self.bytes(&number.to_le_bytes());
    }
}

/// Reads from the front of a slice; zeros where there is nothing more.
pub struct Take<'a>(pub &'a [u8]);

impl Take<'_> {
    /// So many bytes.
    #[inline]
    pub fn bytes<const N: usize>(&mut self) -> [u8; N] {
        match self.0.split_first_chunk::<N>() {
            Some((head, rest)) => {
                self.0 = rest;
                *head
            }
            None => [0; N],
        }
    }

    /// A number of 4 bytes.
    #[inline]
    pub fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.bytes())
    }

    /// A number of 8 bytes.
    #[inline]
    pub fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.bytes())
    }
}
