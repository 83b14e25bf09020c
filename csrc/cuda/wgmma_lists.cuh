// Operand lists of the tensor cores' instructions on sm_90: the names and the registers of N sums of a thread.
#pragma once

#define WGMMA_NAMES_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define WGMMA_NAMES_16 WGMMA_NAMES_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define WGMMA_NAMES_24 WGMMA_NAMES_16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define WGMMA_NAMES_32 WGMMA_NAMES_24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define WGMMA_NAMES_40 WGMMA_NAMES_32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define WGMMA_NAMES_48 WGMMA_NAMES_40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define WGMMA_NAMES_56 WGMMA_NAMES_48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define WGMMA_NAMES_64 WGMMA_NAMES_56 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define WGMMA_NAMES_72 WGMMA_NAMES_64 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define WGMMA_NAMES_80 WGMMA_NAMES_72 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define WGMMA_NAMES_88 WGMMA_NAMES_80 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define WGMMA_NAMES_96 WGMMA_NAMES_88 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define WGMMA_NAMES_104 WGMMA_NAMES_96 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define WGMMA_NAMES_112 WGMMA_NAMES_104 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define WGMMA_NAMES_120 WGMMA_NAMES_112 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define WGMMA_NAMES_128 WGMMA_NAMES_120 ", %120, %121, %122, %123, %124, %125, %126, %127"

#define WGMMA_EIGHT(i)                                                                                        \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])
#define WGMMA_SUMS_8 WGMMA_EIGHT(0)
#define WGMMA_SUMS_16 WGMMA_SUMS_8, WGMMA_EIGHT(8)
#define WGMMA_SUMS_24 WGMMA_SUMS_16, WGMMA_EIGHT(16)
#define WGMMA_SUMS_32 WGMMA_SUMS_24, WGMMA_EIGHT(24)
#define WGMMA_SUMS_40 WGMMA_SUMS_32, WGMMA_EIGHT(32)
#define WGMMA_SUMS_48 WGMMA_SUMS_40, WGMMA_EIGHT(40)
#define WGMMA_SUMS_56 WGMMA_SUMS_48, WGMMA_EIGHT(48)
#define WGMMA_SUMS_64 WGMMA_SUMS_56, WGMMA_EIGHT(56)
#define WGMMA_SUMS_72 WGMMA_SUMS_64, WGMMA_EIGHT(64)
#define WGMMA_SUMS_80 WGMMA_SUMS_72, WGMMA_EIGHT(72)
#define WGMMA_SUMS_88 WGMMA_SUMS_80, WGMMA_EIGHT(80)
#define WGMMA_SUMS_96 WGMMA_SUMS_88, WGMMA_EIGHT(88)
#define WGMMA_SUMS_104 WGMMA_SUMS_96, WGMMA_EIGHT(96)
#define WGMMA_SUMS_112 WGMMA_SUMS_104, WGMMA_EIGHT(104)
#define WGMMA_SUMS_120 WGMMA_SUMS_112, WGMMA_EIGHT(112)
#define WGMMA_SUMS_128 WGMMA_SUMS_120, WGMMA_EIGHT(120)
