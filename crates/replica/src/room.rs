//! Memory for the values of a state: large, written once from its first byte to its last, then only read.

use bytes::BytesMut;

/// The huge pages of the systems that this is built for. Memory that begins at one is huge pages to its end.
const HUGE_PAGE_BYTES: usize = 2 << 20;

/// Empty memory for `bytes`, in huge pages if that pays: when memory is written for the first time, the system clears it page by page, which
/// takes as long as the writing where the pages are of 4 KiB.
pub fn room_for(bytes: usize) -> BytesMut {
    if bytes < 2 * HUGE_PAGE_BYTES {
        return BytesMut::with_capacity(bytes);
    }
    // What lies before and behind is never written, so it takes no memory.
    let mut room = BytesMut::with_capacity(bytes.saturating_add(HUGE_PAGE_BYTES));
    let begin = room.as_ptr().align_offset(HUGE_PAGE_BYTES);
    if begin <= HUGE_PAGE_BYTES {
        // Of an empty buffer the front part is empty, too; the rest has the room.
        room = room.split_off(begin);
    }
    ftcore::prefer_huge_pages(room.spare_capacity_mut());
    room
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_is_room_for_what_was_asked_for_and_large_room_begins_at_a_huge_page() {
        for bytes in [
            0,
            1,
            HUGE_PAGE_BYTES,
            2 * HUGE_PAGE_BYTES,
            5 * HUGE_PAGE_BYTES + 3,
        ] {
            let mut room = room_for(bytes);
            let begin = room.as_ptr();
            assert!(room.is_empty() && room.capacity() >= bytes, "{bytes}");
            assert!(
                bytes < 2 * HUGE_PAGE_BYTES || begin.align_offset(HUGE_PAGE_BYTES) == 0,
                "{bytes}"
            );
            room.resize(bytes, 7);
            assert_eq!(room.as_ptr(), begin, "it was moved");
        }
    }
}
