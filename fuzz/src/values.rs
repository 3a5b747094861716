//! Quantised values: any bytes of the right length are values in every format, and no others are.

use quant::Codec;

/// The first byte picks the format, the next two how many values the rest should hold.
pub fn decode(data: &[u8]) {
    let Some((&[format, low, high], bytes)) = data.split_first_chunk::<3>() else {
        return;
    };
    let Some(codec) = Codec::ALL.get(usize::from(format) % Codec::ALL.len()) else {
        return;
    };
    let count = usize::from(u16::from_le_bytes([low, high]) % 2048);
    let mut values = vec![0f32; count];
    let right = bytes.len() == codec.encoded_len(count);
    assert_eq!(codec.decode(bytes, &mut values).is_ok(), right, "{codec:?}");
    // Bytes cut or filled up to the right length must decode, whatever is in them; twice the same.
    let mut fitted = bytes.to_vec();
    fitted.resize(codec.encoded_len(count), 0x5A);
    let mut again = vec![0f32; count];
    codec
        .decode(&fitted, &mut values)
        .expect("bytes of the right length");
    codec
        .decode(&fitted, &mut again)
        .expect("bytes of the right length");
    let same = values.iter().zip(&again).all(|(a, b)| a.to_bits() == b.to_bits());
    assert!(same, "{codec:?} decodes the same bytes differently");
    codec
        .decode_add(&fitted, &mut again)
        .expect("bytes of the right length");
}

/// Valid bytes of every format.
pub fn seeds() -> Vec<Vec<u8>> {
    (0u8..)
        .zip(Codec::ALL)
        .map(|(format, codec)| {
            let values: Vec<f32> = (0..300).map(|i| (i as f32 - 150.0) * 0.37).collect();
            let mut bytes = vec![format];
            bytes.extend(300u16.to_le_bytes());
            codec.encode(&values, &mut bytes);
            bytes
        })
        .collect()
}
