//! candle adapter: Vars in, nothing else to write.
