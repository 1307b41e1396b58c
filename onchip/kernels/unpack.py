"""PTX that unpacks two 16-bit words, four 8-bit numbers, into fp16: $0 has the even ones of $2, $1
the odd ones. See kernels/triton/kv8.py.
"""

E4M3 = """{
    .reg .b32 t;
    .reg .b16 even, odd;
    prmt.b32 t, $2, 0, 0x3120;
    mov.b32 {even, odd}, t;
    cvt.rn.f16x2.e4m3x2 $0, even;
    cvt.rn.f16x2.e4m3x2 $1, odd;
}"""
# The byte of x + 128 as the last of a number from 1024 on, of which 1152 is taken off again.
INT8 = """{
    .reg .b32 even, odd, offset;
    mov.b32 offset, 0x64806480;
    shr.u32 odd, $2, 8;
    lop3.b32 even, $2, 0x00ff00ff, offset, 0x6a;
    lop3.b32 odd, odd, 0x00ff00ff, offset, 0x6a;
    sub.f16x2 $0, even, offset;
    sub.f16x2 $1, odd, offset;
}"""
