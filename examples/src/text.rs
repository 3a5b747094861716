//! Text to train on, and which bytes of it a replica sees at a step.
//!
//! A file (plain or gzip) or the Jargon File that is built in gives bytes; the last 5 % are held out, the rest is cut
//! into one contiguous shard per replica. A batch is a pure function of (seed, replica, inner step): a replica that replays a
//! step, also in a later incarnation, trains on the same bytes.

use std::io::Read;
use std::ops::Range;
use std::path::Path;

use ftcore::{Error, ErrorKind, Result};

use crate::rng::Rng;

const JARGON: &[u8] = include_bytes!("../data/jargon.txt.gz");
const GZIP_MAGIC: [u8; 2] = [0x1f, 0x8b];
/// A text is held in memory; a larger one is refused.
const MAX_BYTES: u64 = 1 << 30;
/// One byte in this many is held out.
const HELD_OUT_PART: usize = 20;

/// A text in memory, cut into a training part and a held-out part.
#[derive(Debug, Clone)]
pub struct Text {
    name: String,
    bytes: Vec<u8>,
}

impl Text {
    /// The Jargon File 4.4.7, 1,681,817 bytes (see `examples/data/README.md`).
    pub fn embedded() -> Result<Self> {
        Self::read("the built-in Jargon File", JARGON)
    }

    /// The file at `path`: any bytes, gzip or plain, up to 1 GiB. Errors: `NotFound`, `Io` if it cannot be read,
    /// `Corrupt` if it is damaged gzip, `InvalidArgument` if it is too large.
    pub fn open(path: &Path) -> Result<Self> {
        let name = format!("text file '{}'", path.display());
        let file = std::fs::File::open(path).map_err(|e| match e.kind() {
            std::io::ErrorKind::NotFound => {
                Error::new(ErrorKind::NotFound, format!("{name} does not exist")).with_source(e)
            }
            _ => Error::io(format_args!("opening {name}"), e),
        })?;
        Self::read(&name, file)
    }

    /// Bytes that are there already, called `name` in errors.
    pub fn from_bytes(name: &str, bytes: Vec<u8>) -> Self {
        Self {
            name: name.to_owned(),
            bytes,
        }
    }

    fn read(name: &str, source: impl Read) -> Result<Self> {
        let stored = read_limited(name, source, ErrorKind::Io)?;
        let bytes = if stored.starts_with(&GZIP_MAGIC) {
            read_limited(
                name,
                flate2::read::MultiGzDecoder::new(stored.as_slice()),
                ErrorKind::Corrupt,
            )?
        } else {
            stored
        };
        Ok(Self::from_bytes(name, bytes))
    }

    /// What it is, for messages.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The first digits of a hash of all its bytes.
    pub fn fingerprint(&self) -> String {
        blake3::hash(&self.bytes).to_hex().chars().take(16).collect()
    }

    /// The bytes to train on: all but the last 5 %.
    pub fn train(&self) -> &[u8] {
        self.bytes
            .get(..train_bytes(self.bytes.len()))
            .unwrap_or_default()
    }

    /// The bytes never trained on: the last 5 %.
    pub fn held_out(&self) -> &[u8] {
        self.bytes
            .get(train_bytes(self.bytes.len())..)
            .unwrap_or_default()
    }
}

fn train_bytes(total: usize) -> usize {
    total - total / HELD_OUT_PART
}

fn read_limited(name: &str, source: impl Read, kind: ErrorKind) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let got = source
        .take(MAX_BYTES + 1)
        .read_to_end(&mut bytes)
        .map_err(|e| Error::new(kind, format!("reading {name}: {e}")).with_source(e))?;
    if got as u64 > MAX_BYTES {
        return Err(Error::invalid(format!("{name} has more than {MAX_BYTES} bytes")));
    }
    Ok(bytes)
}

/// Windows of a text with their next bytes: row-major, `rows` × `seq`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Batch {
    rows: usize,
    seq: usize,
    tokens: Vec<u32>,
    targets: Vec<u32>,
}

impl Batch {
    /// One row per window; a window of n + 1 bytes gives n positions. Errors: no window, windows of different or too
    /// short length.
    pub fn from_windows(windows: &[&[u8]]) -> Result<Self> {
        let length = windows.first().map_or(0, |w| w.len());
        if length < 2 || windows.iter().any(|w| w.len() != length) {
            return Err(Error::invalid(format!(
                "a batch needs windows of one length of at least 2 bytes, not {:?}",
                windows.iter().map(|w| w.len()).collect::<Vec<_>>()
            )));
        }
        let (mut tokens, mut targets) = (Vec::new(), Vec::new());
        for window in windows {
            tokens.extend(window.iter().take(length - 1).copied().map(u32::from));
            targets.extend(window.iter().skip(1).copied().map(u32::from));
        }
        Ok(Self {
            rows: windows.len(),
            seq: length - 1,
            tokens,
            targets,
        })
    }

    /// The windows of rank `rank` of `ranks` that share this batch evenly. Errors: they cannot.
    pub fn part(&self, rank: usize, ranks: usize) -> Result<Self> {
        let rows = even_part(self.rows, rank, ranks, "windows")?;
        let positions = rows.start * self.seq..rows.end * self.seq;
        let cut = |all: &[u32]| all.get(positions.clone()).unwrap_or_default().to_vec();
        Ok(Self {
            rows: rows.len(),
            seq: self.seq,
            tokens: cut(&self.tokens),
            targets: cut(&self.targets),
        })
    }

    /// The number of windows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Positions per window.
    pub fn seq(&self) -> usize {
        self.seq
    }

    /// The bytes that are seen.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// At each position, the byte that follows.
    pub fn targets(&self) -> &[u32] {
        &self.targets
    }
}

/// Which of `rows` belong to rank `rank` of `ranks`. Errors: the ranks cannot share so many evenly, and a mean of means would be another one.
pub(crate) fn even_part(rows: usize, rank: usize, ranks: usize, what: &str) -> Result<Range<usize>> {
    if ranks == 0 || rank >= ranks || !rows.is_multiple_of(ranks) || rows == 0 {
        return Err(Error::invalid(format!(
            "{ranks} ranks of a replica cannot share {rows} {what} evenly; use a multiple of {ranks} for --batch"
        )));
    }
    let each = rows / ranks;
    Ok(rank * each..(rank + 1) * each)
}

/// Deals batches of a text to the replicas of a run.
#[derive(Debug, Clone)]
pub struct Sampler {
    text: Text,
    replicas: usize,
    rows: usize,
    seq: usize,
    seed: u64,
}

impl Sampler {
    /// Batches of `rows` windows of `seq` positions for `replicas` replicas. Errors: a zero, or a text that is too
    /// small (the message says how many bytes it would need).
    pub fn new(text: Text, replicas: usize, rows: usize, seq: usize, seed: u64) -> Result<Self> {
        if replicas == 0 || rows == 0 || seq == 0 {
            return Err(Error::invalid(format!(
                "sampling needs at least 1 replica, 1 row and 1 position, not {replicas}, {rows}, {seq}"
            )));
        }
        let needed = bytes_needed(replicas, seq);
        if (text.bytes.len() as u128) < needed {
            return Err(Error::invalid(format!(
                "{} has {} bytes; {replicas} replicas and windows of {seq} positions need at least {needed} bytes",
                text.name,
                text.bytes.len()
            )));
        }
        Ok(Self {
            text,
            replicas,
            rows,
            seq,
            seed,
        })
    }

    /// The bytes of the training part that belong to `replica`; empty if there is no such replica.
    pub fn shard(&self, replica: usize) -> Range<usize> {
        if replica >= self.replicas {
            return 0..0;
        }
        let total = self.text.train().len() as u128;
        let cut = |i: usize| (total * i as u128 / self.replicas as u128) as usize;
        cut(replica)..cut(replica + 1)
    }

    /// The batch of `replica` at its inner step `step`: the same for the same seed, replica and step. Errors: no such
    /// replica.
    pub fn batch(&self, replica: usize, step: u64) -> Result<Batch> {
        if replica >= self.replicas {
            return Err(Error::invalid(format!(
                "there is no replica {replica} among {}",
                self.replicas
            )));
        }
        let shard = self.text.train().get(self.shard(replica)).unwrap_or_default();
        let starts = (shard.len() + 1).saturating_sub(self.seq + 1);
        let mut rng = Rng::keyed(&[self.seed, replica as u64, step]);
        let windows: Vec<&[u8]> = (0..self.rows)
            .map(|_| {
                let start = rng.below(starts);
                shard.get(start..start + self.seq + 1).unwrap_or_default()
            })
            .collect();
        Batch::from_windows(&windows)
    }

    /// `count` batches spread evenly over the held-out part: the same on every replica. Errors: `count` is 0.
    pub fn held_out(&self, count: usize) -> Result<Vec<Batch>> {
        if count == 0 {
            return Err(Error::invalid("asked for no held-out batch"));
        }
        let bytes = self.text.held_out();
        let last = bytes.len().saturating_sub(self.seq + 1) as u128;
        let windows: Vec<&[u8]> = (0..count * self.rows)
            .map(|i| {
                let start =
                    (last * i as u128 / (count * self.rows).max(2).saturating_sub(1) as u128) as usize;
                bytes.get(start..start + self.seq + 1).unwrap_or_default()
            })
            .collect();
        windows.chunks(self.rows).map(Batch::from_windows).collect()
    }
}

/// The smallest text whose every shard and whose held-out part hold one window.
fn bytes_needed(replicas: usize, seq: usize) -> u128 {
    let (window, part) = (seq as u128 + 1, HELD_OUT_PART as u128);
    let train = replicas as u128 * window;
    // The smallest n with n - n/20 ≥ train: of 20 bytes, 19 are for training.
    let for_training = train + (train - 1) / (part - 1);
    for_training.max(part * window)
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn counting(n: usize) -> Text {
        Text::from_bytes("counting", (0..n).map(|i| (i % 251) as u8).collect())
    }

    #[test]
    fn the_built_in_text_is_the_jargon_file_and_its_last_twentieth_is_held_out() {
        let text = Text::embedded().unwrap();
        assert_eq!(text.train().len() + text.held_out().len(), 1_681_817);
        assert_eq!(text.held_out().len(), 84_090);
        assert!(String::from_utf8_lossy(&text.train()[..100]).contains("The Jargon File"));
    }

    #[test]
    fn shards_are_disjoint_cover_the_training_part_and_stay_out_of_what_is_held_out() {
        for (bytes, replicas) in [(1000, 1), (1000, 3), (1003, 7), (421, 19)] {
            let sampler = Sampler::new(counting(bytes), replicas, 2, 20, 0).unwrap();
            let mut next = 0;
            for r in 0..replicas {
                let shard = sampler.shard(r);
                assert_eq!(shard.start, next, "{bytes} bytes, replica {r} of {replicas}");
                assert!(shard.len() >= 21);
                next = shard.end;
            }
            assert_eq!(next, sampler.text.train().len());
            assert_eq!(sampler.shard(replicas), 0..0);
        }
    }

    #[test]
    fn the_parts_of_a_batch_are_the_batch() {
        let batch = Sampler::new(counting(1000), 1, 6, 10, 3)
            .unwrap()
            .batch(0, 5)
            .unwrap();
        let parts: Vec<Batch> = (0..3).map(|rank| batch.part(rank, 3).unwrap()).collect();
        assert!(parts.iter().all(|p| (p.rows(), p.seq()) == (2, 10)));
        let joined =
            |of: fn(&Batch) -> &[u32]| parts.iter().flat_map(|p| of(p).to_vec()).collect::<Vec<u32>>();
        assert_eq!(joined(Batch::tokens), batch.tokens());
        assert_eq!(joined(Batch::targets), batch.targets());
        let e = batch.part(0, 4).unwrap_err().to_string();
        assert!(e.contains("4 ranks") && e.contains("6 windows"), "{e}");
    }

    #[test]
    fn batches_come_from_the_replicas_own_shard_and_targets_are_the_next_bytes() {
        // Every byte says which of the two halves it is in.
        let text = Text::from_bytes("halves", [vec![1u8; 500], vec![2; 500], vec![3; 50]].concat());
        let sampler = Sampler::new(text, 2, 4, 16, 9).unwrap();
        assert_eq!(sampler.shard(1), 499..998);
        for step in 0..50 {
            assert!(sampler.batch(0, step).unwrap().tokens().iter().all(|&t| t == 1));
            assert!(sampler.batch(1, step).unwrap().targets().iter().all(|&t| t != 3));
        }
        let counting = Sampler::new(counting(2000), 2, 4, 16, 9)
            .unwrap()
            .batch(1, 0)
            .unwrap();
        assert_eq!(
            (counting.rows(), counting.seq(), counting.tokens().len()),
            (4, 16, 64)
        );
        assert!(
            counting
                .tokens()
                .iter()
                .zip(counting.targets())
                .all(|(a, b)| (a + 1) % 251 == *b)
        );
    }

    #[test]
    fn a_batch_depends_on_seed_replica_and_step_and_on_nothing_else() {
        let make = |seed| Sampler::new(counting(50_000), 2, 4, 32, seed).unwrap();
        let sampler = make(1);
        let first = sampler.batch(0, 7).unwrap();
        sampler.batch(1, 3).unwrap();
        assert_eq!(sampler.batch(0, 7).unwrap(), first);
        assert_eq!(make(1).batch(0, 7).unwrap(), first);
        assert_ne!(sampler.batch(0, 8).unwrap(), first);
        assert_ne!(make(2).batch(0, 7).unwrap(), first);
    }

    #[test]
    fn held_out_batches_span_the_held_out_part_from_its_first_to_its_last_byte() {
        let text = counting(20_000);
        let (first, last) = (
            u32::from(text.held_out()[0]),
            u32::from(*text.held_out().last().unwrap()),
        );
        let sampler = Sampler::new(text, 1, 3, 10, 0).unwrap();
        let batches = sampler.held_out(4).unwrap();
        assert_eq!(batches.len(), 4);
        assert_eq!(batches[0].tokens()[0], first);
        assert_eq!(batches[3].targets().last(), Some(&last));
        assert!(sampler.held_out(0).is_err());
    }

    #[test]
    fn a_text_that_is_too_small_says_how_many_bytes_it_needs_and_that_many_are_enough() {
        for (replicas, seq) in [(1, 1), (1, 64), (2, 9), (19, 9), (20, 9), (21, 9), (64, 33)] {
            let needed = bytes_needed(replicas, seq) as usize;
            let e = Sampler::new(counting(needed - 1), replicas, 2, seq, 0).unwrap_err();
            assert!(
                e.to_string().contains(&format!("need at least {needed} bytes")),
                "{e}"
            );
            let sampler = Sampler::new(counting(needed), replicas, 2, seq, 0).unwrap();
            for r in 0..replicas {
                assert_eq!(sampler.batch(r, 0).unwrap().rows(), 2);
            }
            assert_eq!(sampler.held_out(1).unwrap().len(), 1);
        }
    }

    #[test]
    fn missing_unreadable_and_damaged_files_are_told_apart() {
        let dir = tempfile::tempdir().unwrap();
        let missing = Text::open(&dir.path().join("none.txt")).unwrap_err();
        assert_eq!(missing.kind(), ErrorKind::NotFound);
        assert!(
            missing.to_string().contains("none.txt' does not exist"),
            "{missing}"
        );
        assert_eq!(Text::open(dir.path()).unwrap_err().kind(), ErrorKind::Io);
        let damaged = dir.path().join("damaged.gz");
        std::fs::write(&damaged, &JARGON[..10_000]).unwrap();
        let e = Text::open(&damaged).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Corrupt);
        assert!(e.to_string().contains("damaged.gz"), "{e}");
    }

    #[test]
    fn a_gzip_file_and_its_plain_content_are_the_same_text() {
        let dir = tempfile::tempdir().unwrap();
        let content = b"0123456789".repeat(30);
        let mut gz = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        gz.write_all(&content).unwrap();
        std::fs::write(dir.path().join("a.gz"), gz.finish().unwrap()).unwrap();
        std::fs::write(dir.path().join("a.txt"), &content).unwrap();
        for file in ["a.gz", "a.txt"] {
            let text = Text::open(&dir.path().join(file)).unwrap();
            assert_eq!([text.train(), text.held_out()].concat(), content);
        }
    }
}
