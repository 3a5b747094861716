//! Damages valid bytes the way that fuzzers do.

/// xorshift64*: the same cases for the same seed.
struct Dice(u64);

impl Dice {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() >> 16) as usize % n.max(1)
    }
}

/// Lengths and counts that have broken parsers before.
const NUMBERS: [u64; 12] = [
    0,
    1,
    0x7F,
    0xFF,
    0x7FFF,
    0xFFFF,
    0x7FFF_FFFF,
    0xFFFF_FFFF,
    1 << 32,
    i64::MAX as u64,
    1 << 63,
    u64::MAX,
];
/// Cases are small: what breaks on megabytes breaks on a length that claims them.
const LONGEST: usize = 8192;

/// An endless source of damaged bytes.
pub(crate) struct Mutator {
    dice: Dice,
    corpus: Vec<Vec<u8>>,
}

impl Mutator {
    pub(crate) fn new(seed: u64, corpus: Vec<Vec<u8>>) -> Self {
        Self {
            dice: Dice(seed | 1),
            corpus,
        }
    }

    pub(crate) fn next(&mut self) -> Vec<u8> {
        let mut data = if self.corpus.is_empty() || self.dice.below(16) == 0 {
            let len = self.dice.below(300);
            (0..len).map(|_| self.dice.next() as u8).collect()
        } else {
            let which = self.dice.below(self.corpus.len());
            self.corpus[which].clone()
        };
        for _ in 0..1 + self.dice.below(4) {
            self.damage(&mut data);
        }
        data.truncate(LONGEST);
        data
    }

    fn damage(&mut self, data: &mut Vec<u8>) {
        let len = data.len();
        let at = self.dice.below(len);
        match self.dice.below(8) {
            _ if len == 0 => data.push(self.dice.next() as u8),
            0 => data[at] ^= 1 << self.dice.below(8),
            1 => data[at] = self.dice.next() as u8,
            2 => data.truncate(at),
            3 => {
                let number = NUMBERS[self.dice.below(NUMBERS.len())];
                let width = [1, 2, 4, 8][self.dice.below(4)];
                let bytes = number.to_le_bytes();
                for (to, from) in data.iter_mut().skip(at).zip(bytes.iter().take(width)) {
                    *to = *from;
                }
            }
            4 => data.insert(at, self.dice.next() as u8),
            5 => {
                // A digit for a digit: text stays text, numbers become others.
                if data[at].is_ascii_digit() {
                    data[at] = b'0' + self.dice.below(10) as u8;
                } else {
                    data.remove(at);
                }
            }
            6 => {
                let end = at + self.dice.below(len - at);
                let piece = data[at..end].to_vec();
                let to = self.dice.below(len);
                data.splice(to..to, piece);
            }
            _ => {
                let other = self.dice.below(self.corpus.len());
                if let Some(other) = self.corpus.get(other) {
                    let from = self.dice.below(other.len());
                    data.truncate(at);
                    data.extend_from_slice(&other[from..]);
                }
            }
        }
    }
}
